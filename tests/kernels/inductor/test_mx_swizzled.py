"""MXFP8 with swizzled scales: the code that Inductor writes for a B200, interpreted, against the formula."""

from __future__ import annotations

import pytest
import torch
from compile_kernels import compile_kernels
from interpreted_step import HEURISTIC_BLOCKS, compiled_for_gpu
from torch import Tensor

from fp8_compile.kernels.mx_swizzled import quantize_mx_swizzled_op, swizzle, unswizzle


def quantized(gate: Tensor, up: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    x = torch.nn.functional.silu(gate) * up
    rows, columns = quantize_mx_swizzled_op(x, [1, 32]), quantize_mx_swizzled_op(x, [32, 1])
    transposed, tiles = quantize_mx_swizzled_op(x, [32, 1], True), quantize_mx_swizzled_op(weight, [32, 32])
    return rows[0], rows[1], columns[0], columns[2], transposed[0], transposed[2], *tiles


def hostile(rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + cols)
    gate, up, weight = torch.randn(rows, cols), torch.randn(rows, cols), torch.randn(cols, rows)
    gate[3, 5], up[40, 40], gate[0, :32] = torch.nan, torch.inf, 0
    up[5] *= 1e-38
    up[6] *= 1e38
    return gate, up, weight


@pytest.mark.parametrize("rows, cols", [(256, 384), (96, 160)])
def test_codes_and_scales_of_the_generated_code_are_those_of_the_formula(rows: int, cols: int) -> None:
    given = hostile(rows, cols)
    with compiled_for_gpu(HEURISTIC_BLOCKS, 100) as graphs:
        results = torch.compile(quantized, backend="inductor")(*given)
    for actual, expected in zip(results, quantized(*given), strict=True):
        assert (actual.shape, actual.stride(), actual.dtype) == (expected.shape, expected.stride(), expected.dtype)
        same = actual.view(torch.uint8) == expected.view(torch.uint8)
        if actual.dtype is torch.float8_e4m3fn:
            same |= actual.float().isnan() & expected.float().isnan()
        assert same.all()
    compiled = list(compile_kernels(graphs[0].source))
    assert [kernel.name for kernel in compiled if kernel.spills or kernel.nan_clamps] == []
    if (rows, cols) == (256, 384):
        assert len(compiled) == 2  # one kernel for the activation in three layouts, one for the weight


@pytest.mark.parametrize("outer, blocks", [(128, 4), (1, 1), (300, 7)])
def test_swizzled_scales_are_where_the_manual_says(outer: int, blocks: int) -> None:
    scale = torch.randint(1, 255, (outer, blocks), dtype=torch.uint8)
    flat = swizzle(scale)
    for r in range(outer):
        for c in range(blocks):
            place = (r // 128 * -(-blocks // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
            assert flat[place] == scale[r, c]
    assert (flat != 0).sum() == outer * blocks
    assert torch.equal(unswizzle(flat, outer, blocks), scale)
