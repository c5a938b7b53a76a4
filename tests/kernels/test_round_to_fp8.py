"""Rounding in FP32 gives the values of a cast to FP8 and back: torch's cast, and the table's nearest-even search."""

from __future__ import annotations

import fp8_reference as reference
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from fp8_compile.kernels.formats import Format, format_of
from fp8_compile.kernels.round_to_fp8 import round_to_fp8

each_format = pytest.mark.parametrize("expected", reference.FORMATS, ids=lambda format: format.name)


def check(x: torch.Tensor, expected: reference.Fp8) -> None:
    """Equal values; the sign of a zero is the one thing that may differ (see the test of its own below)."""
    rounded = round_to_fp8(x, format_of(expected.dtype))
    assert rounded.dtype == torch.float32
    cast = x.to(expected.dtype).float()
    table = torch.from_numpy(expected.round(x.double().numpy())).float()
    for what, other in (("torch's cast", cast), ("the table", table)):
        bad = rounded != other
        assert not bad.any(), f"{x[bad][:4].tolist()} -> {rounded[bad][:4].tolist()}, {what}: {other[bad][:4].tolist()}"


def in_range(x: torch.Tensor, expected: reference.Fp8) -> torch.Tensor:
    return x[x.abs() <= expected.max]


@each_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_values_in_range_round_as_a_cast_does(expected: reference.Fp8, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    x = in_range(every, expected)
    assert x.numel() > 30_000
    check(x, expected)


@each_format
def test_values_midpoints_and_their_fp32_neighbours_round_as_a_cast_does(expected: reference.Fp8) -> None:
    magnitudes = torch.from_numpy(expected.magnitudes)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    points = torch.cat([magnitudes, midpoints]).float()
    assert torch.equal(points[: len(magnitudes)].double(), magnitudes), "every midpoint is exact in FP32"
    above, below = (torch.nextafter(points, torch.tensor(end)) for end in (torch.inf, -torch.inf))
    x = torch.cat([points, above, below])
    check(in_range(torch.cat([x, -x]), expected), expected)


@each_format
def test_fp32_values_across_all_exponents_round_as_a_cast_does(expected: reference.Fp8) -> None:
    # A prime stride through the bit patterns meets every exponent with many mantissas.
    every = torch.arange(-(2**31), 2**31, 20_011, dtype=torch.int64).to(torch.int32).view(torch.float32)
    check(in_range(every, expected), expected)


@each_format
@hypothesis.given(x=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_any_fp32_value_that_was_clamped_rounds_as_a_cast_does(expected: reference.Fp8, x: list[float]) -> None:
    check(torch.tensor(x, dtype=torch.float32).clamp(-expected.max, expected.max), expected)


@each_format
def test_nan_stays_nan_and_leaves_its_neighbours_alone(expected: reference.Fp8) -> None:
    rounded = round_to_fp8(torch.tensor([1.0, torch.nan, -3.0]), format_of(expected.dtype))
    assert rounded.isnan().tolist() == [False, True, False]
    assert rounded[[0, 2]].tolist() == [1.0, -3.0]


@each_format
def test_a_lost_sign_of_zero_changes_no_product_and_no_sum(expected: reference.Fp8) -> None:
    """A negative value below half the smallest one becomes +0 here and -0 in a cast to a format that has a -0.

    Harmless: no upcast in our graphs goes anywhere but into a product with a finite or NaN operand, whose result is
    a zero or a NaN either way, and a sum with a zero of either sign is the same number.
    """
    format: Format = format_of(expected.dtype)
    tiny = torch.tensor([-expected.magnitudes[1] / 4, -0.0], dtype=torch.float32)
    ours, cast = round_to_fp8(tiny, format), tiny.to(expected.dtype).float()
    assert torch.equal(ours, cast) and ours.tolist() == [0.0, 0.0]
    assert torch.equal(torch.signbit(cast), torch.tensor([expected.special != "fnuz"] * 2))
    values = torch.from_numpy(expected.values).float()
    others = values[~values.isinf()]
    for zero in (ours[:1], cast[:1]):
        products = zero[:, None] @ others[None, :]
        np.testing.assert_array_equal(products.isnan(), others.isnan()[None])
        assert torch.equal((products + 1.0).nan_to_num(), torch.ones_like(products) * ~others.isnan())
