"""The C++ kernels against the plain-PyTorch formulas, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_compile.kernels import quantize as reference
from fp8_compile.kernels.cpu.quantize import cast_op, scales_op
from fp8_compile.kernels.formats import E4M3, E5M2, Format

BLOCKS = ([-1, -1], [1, -1], [-1, 1])
FORMATS = (E4M3, E5M2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, with NaN equal to NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def wide(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values over many orders of magnitude, so that some round to subnormals and to zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    return (x * torch.exp(3 * torch.randn(rows, cols, generator=generator))).to(dtype)


def check(x: torch.Tensor, format: Format, block: list[int], scales=scales_op, cast=cast_op) -> None:
    quant_scale, dequant_scale = reference.scales(x, format.dtype, block)
    found = scales(x, format.dtype, block)
    assert same(found[0], quant_scale) and same(found[1], dequant_scale)
    q = reference.cast(x, quant_scale, format.dtype, block)
    kept = ~q.float().isnan()
    assert torch.equal(
        cast(x, quant_scale, format.dtype, block).view(torch.uint8)[kept], q.view(torch.uint8)[kept]
    ), "bytes, signs of zero included"
    assert same(cast(x, quant_scale, format.dtype, block).float(), q.float())


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 77), (1, 5), (5, 1), (64, 300), (3, 4097)], ids=str)
def test_scales_and_bytes_are_those_of_the_formula(shape, dtype, format, block) -> None:
    check(wide(*shape, dtype), format, block)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 300), st.sampled_from(DTYPES), st.sampled_from(FORMATS), st.sampled_from(BLOCKS),
    st.sampled_from([math.inf, -math.inf, math.nan, 0.0]), st.integers(0, 10**6),
)  # fmt: skip
def test_one_special_value_anywhere_is_treated_as_by_the_formula(
    rows, cols, dtype, format, block, special, seed
) -> None:
    x = wide(rows, cols, dtype, seed)
    x.view(-1)[seed % x.numel()] = special
    check(x, format, block)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_ties_round_to_even_between_every_two_neighbours(format: Format) -> None:
    codes = torch.arange(128, dtype=torch.uint8).view(format.dtype).float()
    codes = codes[codes.isfinite()]
    middle = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([middle, middle * (1 + 2**-20), middle * (1 - 2**-20)])[None]
    x = torch.cat([x, -x])
    one = torch.ones(1, 1)
    assert torch.equal(cast_op(x, one, format.dtype, [-1, -1]).view(torch.uint8), x.to(format.dtype).view(torch.uint8))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_strides_of_the_input_do_not_matter(block: list[int]) -> None:
    base = wide(40, 60, torch.float32)
    for x in (base.t(), base[::2], base[:, ::3], base[:, 5:9], base[:1].expand(7, 60)):
        check(x, E4M3, block)


def test_empty_matrices_pass_through() -> None:
    for shape in ((0, 8), (8, 0)):
        x = torch.empty(shape)
        quant_scale, dequant_scale = scales_op(x, E4M3.dtype, [-1, -1])
        assert quant_scale.isfinite().all() and dequant_scale.isfinite().all()
        assert cast_op(x, quant_scale, E4M3.dtype, [-1, -1]).shape == shape


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, before = wide(257, 513, torch.float32), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            scale = scales_op(x, E4M3.dtype, [-1, 1])[0]
            results.append((scale, cast_op(x, scale, E4M3.dtype, [-1, 1]).view(torch.uint8)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_without_a_compiler_it_is_the_plain_formula(block: list[int]) -> None:
    without = torch.ops.fp8_compile.scales_formula, torch.ops.fp8_compile.cast_formula
    check(wide(33, 77, torch.bfloat16), E4M3, block, *without)
