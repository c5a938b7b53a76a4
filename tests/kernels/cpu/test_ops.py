"""The C++ kernels against the plain-PyTorch formulas, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_compile.kernels import quantize as reference
from fp8_compile.kernels.cpu import ops
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


def check(x: torch.Tensor, format: Format, block: list[int]) -> None:
    quant_scale, dequant_scale = reference.scales(x, format.dtype, block)
    found = ops.scales(x, format.dtype, block)
    assert same(found[0], quant_scale) and same(found[1], dequant_scale)
    q = reference.cast(x, quant_scale, format.dtype, block)
    kept = ~q.float().isnan()
    assert torch.equal(
        ops.cast(x, quant_scale, format.dtype, block).view(torch.uint8)[kept], q.view(torch.uint8)[kept]
    ), "bytes, signs of zero included"
    assert same(ops.cast(x, quant_scale, format.dtype, block).float(), q.float())
    assert same(ops.round(x, quant_scale, format.dtype, block), q.float())
    assert same(ops.decode(q), q.float())


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 77), (1, 5), (5, 1), (64, 300), (3, 4097)], ids=str)
def test_scales_bytes_and_rounded_values_are_those_of_the_formula(shape, dtype, format, block) -> None:
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
def test_every_code_decodes_to_its_value(format: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(format.dtype)
    assert same(ops.decode(codes), codes.float())


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_ties_round_to_even_between_every_two_neighbours(format: Format) -> None:
    codes = torch.arange(128, dtype=torch.uint8).view(format.dtype).float()
    codes = codes[codes.isfinite()]
    middle = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([middle, middle * (1 + 2**-20), middle * (1 - 2**-20)])[None]
    x = torch.cat([x, -x])
    one = torch.ones(1, 1)
    assert torch.equal(ops.round(x, one, format.dtype, [-1, -1]), x.to(format.dtype).float())
    assert torch.equal(ops.cast(x, one, format.dtype, [-1, -1]).view(torch.uint8), x.to(format.dtype).view(torch.uint8))


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_strides_of_the_input_do_not_matter(block: list[int]) -> None:
    base = wide(40, 60, torch.float32)
    for x in (base.t(), base[::2], base[:, ::3], base[:, 5:9], base[:1].expand(7, 60)):
        check(x, E4M3, block)


def test_empty_matrices_pass_through() -> None:
    for shape in ((0, 8), (8, 0)):
        x = torch.empty(shape)
        quant_scale, dequant_scale = ops.scales(x, E4M3.dtype, [-1, -1])
        assert quant_scale.isfinite().all() and dequant_scale.isfinite().all()
        assert ops.cast(x, quant_scale, E4M3.dtype, [-1, -1]).shape == shape


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, before = wide(257, 513, torch.float32), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            scale = ops.scales(x, E4M3.dtype, [-1, 1])[0]
            results.append((scale, ops.round(x, scale, E4M3.dtype, [-1, 1])))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("scales", ["tensor", "rows"])
def test_the_product_is_that_of_the_reference_gemm(scales: str, with_bias: bool, out_dtype: torch.dtype) -> None:
    block = [-1, -1] if scales == "tensor" else [1, -1]
    a, b = torch.randn(9, 70), torch.randn(33, 70)
    (qa, sa), (qb, sb) = (reference.quantize(x, E4M3.dtype, block) for x in (a, b))
    bias = torch.randn(33).to(out_dtype) if with_bias else None
    exact_a, exact_b = qa.double() * sa.double(), (qb.double() * sb.double()).t()
    expected = exact_a @ exact_b + (0 if bias is None else bias.double())
    summing = 1e-6 * (exact_a.abs() @ exact_b.abs() + 1)
    for left, right in ((qa, qb.t()), (ops.decode(qa), ops.decode(qb).t())):
        y = ops.scaled_product(left, right, sa, sb.t(), bias, out_dtype)
        assert y.dtype == out_dtype
        assert ((y.double() - expected).abs() <= summing + torch.finfo(out_dtype).eps * expected.abs()).all()


def test_a_scale_that_is_not_finite_reaches_the_product() -> None:
    one, nan = torch.ones(1, 1), torch.full((1, 1), math.nan)
    y = ops.scaled_product(torch.ones(2, 3), torch.ones(3, 4), one, nan, None, torch.float32)
    assert y.isnan().all()
