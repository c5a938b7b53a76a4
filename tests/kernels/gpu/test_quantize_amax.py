"""quantize_amax gives the reference's bytes and the largest magnitude, whatever the numbers."""

from __future__ import annotations

import pytest
import torch
from interpreted import check_same, interpreted

from fp8_compile.kernels.formats import BY_DTYPE, Format
from fp8_compile.kernels.gpu import quantize_amax, tile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_format = pytest.mark.parametrize("format", list(BY_DTYPE.values()), ids=str)
NOTHING = tile.NOTHING


def check(x: torch.Tensor, format: Format, scale: float = 20.0, before: float = NOTHING) -> torch.Tensor:
    quant_scale, amax = torch.tensor(scale), torch.tensor([before])
    with interpreted(quantize_amax, tile):
        q = quantize_amax.quantize_amax(x, quant_scale, format.dtype, amax)
    expected, magnitude = quantize_amax.reference(x, quant_scale, format.dtype)
    check_same(q, expected)
    if before == NOTHING:
        check_same(amax[0], magnitude)
    return amax[0]


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_sizes_are_bit_equal_to_the_reference(format: Format, dtype: torch.dtype, generator) -> None:
    for shape in [(1,), (7,), (33, 131), (4097,), (3, 5, 7)]:
        check((torch.randn(shape, generator=generator) * 8).to(dtype), format)


@each_format
def test_inf_and_nan_stay_visible_in_the_bytes_and_nan_wins_in_the_amax(format: Format, generator) -> None:
    x = torch.randn(5000, generator=generator)
    x[10] = -torch.inf
    assert check(x, format) == torch.inf
    x[4500] = torch.nan  # of another program
    assert check(x, format).isnan()


def test_an_empty_tensor_and_a_tensor_of_zeros_record_zero() -> None:
    for x in (torch.zeros(0), torch.zeros(3, 0), torch.zeros(70), -torch.zeros(5)):
        assert check(x, BY_DTYPE[torch.float8_e4m3fn]) == 0


def test_a_larger_amax_that_was_recorded_before_stays_and_a_smaller_one_goes() -> None:
    x = torch.tensor([-3.0, 2.0])
    e4m3 = BY_DTYPE[torch.float8_e4m3fn]
    assert check(x, e4m3, before=5.0) == 5.0
    assert check(x, e4m3, before=1.0) == 3.0
    assert check(x, e4m3, before=torch.nan).isnan()


@each_format
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e30, torch.inf, torch.nan])
def test_any_scale_gives_what_the_reference_gives(format: Format, scale: float) -> None:
    check(torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-12, -1.0, 3e38]), format, scale)


def test_a_tensor_that_is_not_contiguous_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(ValueError, match="contiguous tensor, got strides .*quantize_transpose"):
        quantize_amax.quantize_amax(torch.zeros(4, 6).t(), torch.ones(()), torch.float8_e4m3fn, torch.zeros(1))
