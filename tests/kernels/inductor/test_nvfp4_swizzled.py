"""NVFP4 with swizzled scales: the code that Inductor writes for a Blackwell, interpreted, against the formula."""

from __future__ import annotations

import pytest
import torch
from compile_kernels import compile_kernels
from interpreted_step import HEURISTIC_BLOCKS, compiled_for_gpu
from torch import Tensor

from fp8_compile.kernels.mx_swizzled import unswizzle
from fp8_compile.kernels.nvfp4_swizzled import quantize_nvfp4_swizzled_op as quantize

ROWS, TILES = [1, 16], [16, 16]


def quantized(gate: Tensor, up: Tensor, weight: Tensor, table: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
    x = torch.nn.functional.silu(gate) * up
    rows, cols = x.shape
    enc, other = table[1, 2].view(1, 1), table[0, 3].view(1, 1)
    results = [
        quantize(x, enc, 1.0, ROWS, False, False, None, 0, False, cols),
        quantize(x, enc, 0.25, ROWS, True, True, None, 0, False, rows),
        quantize(weight, other, 1.0, TILES, False, False, None, 0, False, rows),
        quantize(weight, other, 1.0, TILES, True, False, None, 0, False, cols),
        quantize(gate, other, 1.0, ROWS, False, False, seeds[:1], 0, False, cols),
        quantize(gate, other, 0.25, ROWS, True, True, seeds[1:], 1, False, rows),
    ]
    return tuple(part for both in results for part in both)


@pytest.mark.parametrize("rows, cols, capability", [(128, 256, 100), (96, 32, 120)])
def test_codes_and_scales_of_the_generated_code_are_those_of_the_formula(rows: int, cols: int, capability: int) -> None:
    torch.manual_seed(rows + cols)
    gate, up, weight = torch.randn(rows, cols), torch.randn(rows, cols), torch.randn(cols, rows)
    gate[3, 5], up[40, 20], gate[0, :32] = torch.nan, torch.inf, 0
    up[5] *= 1e-38
    up[6] *= 1e38
    given = gate, up, weight, torch.tensor([[1.0, 2.0, 3.0, 40.0], [5.0, 6.0, 70.0, 8.0]]), torch.tensor([9, 2**60 + 3])
    with compiled_for_gpu(HEURISTIC_BLOCKS, capability) as graphs:
        results = torch.compile(quantized, backend="inductor")(*given)
    expected = quantized(*given)
    for (codes, scales), (right, right_scales) in zip(_pairs(results), _pairs(expected), strict=True):
        assert codes.shape == right.shape and scales.shape == right_scales.shape
        nan = right_scales.float().isnan()
        assert torch.equal(scales.float().nan_to_num(-1), right_scales.float().nan_to_num(-1))
        flat = unswizzle(nan.to(torch.uint8), codes.shape[0], codes.shape[1] // 8).bool()
        spoilt = flat.repeat_interleave(8, 1)  # codes of a block with Inf or NaN do not matter
        assert torch.equal(codes.masked_fill(spoilt, 0), right.masked_fill(spoilt, 0))
    compiled = list(compile_kernels(graphs[0].source))
    assert [kernel.name for kernel in compiled if kernel.spills or kernel.nan_clamps] == []
    if (rows, cols) == (128, 256):
        assert len(compiled) == 2  # one kernel for what is computed from the gate, one for the weight


def _pairs(results: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(results[::2], results[1::2]))


def filled(x: Tensor, enc: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.shape[0]
    full = torch.nn.functional.pad(x, (0, 0, 0, -rows % 32))
    return quantize(full, enc, 0.25, ROWS, True, True, seed, 1, False, rows + -rows % 16)


def test_a_number_of_tokens_that_is_known_only_when_it_runs_is_filled_up() -> None:
    torch.manual_seed(0)
    x, enc, seed = torch.randn(40, 32), torch.full((1, 1), 50.0), torch.tensor([3])
    torch._dynamo.mark_dynamic(x, 0)
    with compiled_for_gpu(HEURISTIC_BLOCKS, 100):
        results = torch.compile(filled, backend="inductor")(x, enc, seed)
    for actual, expected in zip(results, filled(x, enc, seed), strict=True):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
