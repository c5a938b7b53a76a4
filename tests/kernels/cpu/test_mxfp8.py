"""MXFP8 in C++ against FP64 and the formula, for every instruction set that this machine can run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from instruction_sets import RUNNABLE, using
from torch import Tensor

from fp8_compile.kernels import mxfp8
from fp8_compile.kernels.quantize import spread

E4M3 = torch.float8_e4m3fn
LARGEST_ERROR = 1e-6  # of the whole result, by its norm
LAYOUTS = ("rows", "columns", "strided")


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same matrix with other strides."""
    if layout == "rows":
        return x
    if layout == "columns":
        return x.t().contiguous().t()
    wide = torch.zeros(2 * x.shape[0], 3 * x.shape[1], dtype=x.dtype)
    wide[::2, ::3] = x
    return wide[::2, ::3]


def operand(
    rows: int, cols: int, block: tuple[int, int], seed: int, low: int = 90, high: int = 140
) -> tuple[Tensor, Tensor]:
    """Codes over the whole format, subnormals included, and scales of any size; neither has a NaN."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 0x7F, (rows, cols), generator=generator) | (
        torch.randint(0, 2, (rows, cols), generator=generator) << 7
    )
    sizes = -(-rows // block[0]), -(-cols // block[1])
    scales = torch.randint(low, high + 1, sizes, generator=generator)
    return codes.to(torch.uint8).view(E4M3), scales.to(torch.uint8)


def exact(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    return codes.double() * spread(torch.exp2(scales.double() - 127), codes.shape, block)


def product(
    m: int, n: int, k: int, blocks: tuple[tuple[int, int], tuple[int, int]], layouts: tuple[str, str],
    left_scales: tuple[int, int] = (90, 140), right_scales: tuple[int, int] = (90, 140),
) -> Tensor:  # fmt: skip
    """Held against FP64, by the norm of each row: rows may be of very different sizes."""
    left, scale_left = operand(m, k, blocks[0], 0, *left_scales)
    right, scale_right = operand(k, n, blocks[1], 1, *right_scales)
    wide_left, wide_right = exact(left, scale_left, blocks[0]), exact(right, scale_right, blocks[1])
    y = mxfp8.mx_mm_op(
        *(laid_out(one, layout) for one, layout in zip((left, right), layouts)),
        *(laid_out(one, layout) for one, layout in zip((scale_left, scale_right), layouts)),
        None,
        torch.float32,
    )
    usual = ((wide_left**2) @ (wide_right**2)).sqrt()  # where a sum cancels out, that of its terms counts
    assert ((y.double() - wide_left @ wide_right).norm(dim=1) <= LARGEST_ERROR * usual.norm(dim=1)).all()
    return y


LINES, TILES = ((1, 32), (32, 1)), ((32, 32), (32, 32))


@pytest.mark.parametrize("blocks", [LINES, TILES, ((1, 32), (32, 32)), ((32, 32), (32, 1))], ids=str)
def test_every_layout_and_kind_of_scales_is_exact_but_for_the_sum(kernels: str, blocks) -> None:
    for layouts in itertools.product(LAYOUTS, LAYOUTS):
        product(37, 45, 150, blocks, layouts)


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (4, 33, 97), (12, 32, 32), (13, 33, 31), (33, 65, 129), (17, 40, 2200)])
def test_odd_sizes_need_no_padding(kernels: str, m: int, n: int, k: int) -> None:
    for layouts, blocks in itertools.product((("rows", "columns"), ("columns", "rows")), (LINES, TILES)):
        product(m, n, k, blocks, layouts)


@pytest.mark.parametrize(
    "left, right",
    [
        *(((0, 6), (110, 130)), ((0, 0), (120, 135)), ((20, 40), (100, 120))),  # below what bf16 products can hold
        *(((225, 231), (20, 60)), ((236, 240), (0, 5))),  # large by small
        *(((0, 231), (100, 110)), ((60, 231), (0, 120))),  # rows too far apart for bf16: in FP32
    ],
    ids=str,
)
def test_scales_at_the_ends_of_e8m0_lose_nothing(kernels: str, left, right) -> None:
    assert product(24, 40, 96, LINES, ("rows", "columns"), left, right).isfinite().all()


@pytest.mark.parametrize("tiny", [False, True])
def test_a_nan_reaches_its_row_or_column_and_no_other(kernels: str, tiny: bool) -> None:
    """A scale that is NaN, even of codes that are zero, and a code that is; in bf16, and in FP32."""
    left, scale_left = operand(40, 96, (1, 32), 0, 100 if not tiny else 1, 150 if not tiny else 250)
    right, scale_right = operand(96, 70, (32, 1), 1, 40, 50)
    left.view(torch.uint8)[5] = 0
    scale_left[5, 1] = 255
    left.view(torch.uint8)[7, 95] = 0xFF
    right.view(torch.uint8)[3, 9] = 0x7F
    scale_right[2, 33] = 255
    y = mxfp8.mx_mm_op(left, right, scale_left, scale_right, None, torch.float32)
    expected = torch.zeros(40, 70, dtype=torch.bool)
    expected[[5, 7]] = expected[:, [9, 33]] = True
    assert torch.equal(y.isnan(), expected)


def test_blocks_of_zeros_are_zeros(kernels: str) -> None:
    x = torch.randn(30, 128)
    x[3] = x[:, 32:64] = 0
    codes, scales = mxfp8.quantize_mx(x, (1, 32))
    other, other_scales = operand(128, 20, (32, 32), 1)
    y = mxfp8.mx_mm_op(codes, other, scales, other_scales, None, torch.float32)
    assert (y[3] == 0).all()
    expected = exact(codes, scales, (1, 32)) @ exact(other, other_scales, (32, 32))
    assert (y - expected).norm() <= LARGEST_ERROR * expected.norm()


def test_no_k_at_all_gives_the_bias(kernels: str) -> None:
    empty = torch.empty(3, 0).to(E4M3), torch.empty(0, 5).to(E4M3)
    scales = torch.empty(3, 0, dtype=torch.uint8), torch.empty(0, 5, dtype=torch.uint8)
    bias = torch.arange(5.0)
    assert torch.equal(mxfp8.mx_mm_op(*empty, *scales, bias, torch.float32), bias.expand(3, 5))


def test_a_bias_is_added_and_results_have_the_dtype_that_is_asked_for() -> None:
    left, scale_left = operand(9, 64, (1, 32), 0, 110, 115)
    right, scale_right = operand(64, 40, (32, 1), 1, 110, 115)
    bias = torch.randn(40)
    plain = mxfp8.mx_mm_op(left, right, scale_left, scale_right, None, torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = mxfp8.mx_mm_op(left, right, scale_left, scale_right, bias.bfloat16(), dtype)
        assert torch.equal(y, (plain + bias.bfloat16()).to(dtype))


def test_threads_change_nothing() -> None:
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(product(130, 260, 700, LINES, ("rows", "columns")))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_the_op_and_its_fake_agree() -> None:
    left, scale_left = operand(6, 70, (1, 32), 0)
    right, scale_right = operand(70, 5, (32, 32), 1)
    for bias, dtype in ((None, torch.bfloat16), (torch.randn(5), torch.float32)):
        arguments = (left, right, scale_left, scale_right, bias, dtype)
        torch.library.opcheck(mxfp8.mx_mm_op, arguments, test_utils=("test_faketensor",))


def with_extremes(x: Tensor) -> Tensor:
    """Zeros, subnormals, the largest numbers, Inf and NaN among the others."""
    y = x.clone()
    y[0, 3], y[-1, 1], y[5, 5] = torch.inf, torch.nan, -torch.inf
    y[x.shape[0] // 2, :40] = 0
    y[2] *= 1e-38
    y[3] *= 1e30
    y[4] *= 1e-44
    y[6] = -0.0
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantizes_are_the_formula_s_bits(kernels: str, dtype: torch.dtype, generator) -> None:
    shapes = [(1, 1), (7, 33), (65, 300), (130, 513)]
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    for x in (*inputs, *map(with_extremes, inputs[1:]), torch.zeros(0, 40), torch.zeros(40, 0)):
        for block, layout in itertools.product(mxfp8.BLOCKS, LAYOUTS):
            given = laid_out(x.to(dtype), layout)
            q, scale = mxfp8.quantize_mx_op(given, block)
            expected, expected_scale = mxfp8.quantize_mx(given, block)
            assert q.is_contiguous() and torch.equal(scale, expected_scale)
            codes, expected_codes = (one.contiguous().view(torch.uint8) for one in (q, expected))
            either_nan = ((codes & 0x7F) == 0x7F) & ((expected_codes & 0x7F) == 0x7F)
            assert torch.equal(codes[~either_nan], expected_codes[~either_nan])
