"""The NVFP4 quantize of training as a Triton kernel: the reference's bits, and what its machine code shows."""

from __future__ import annotations

import pytest
import torch
import triton
from interpreted import interpreted
from torch import Tensor

from fp8_compile.kernels.gpu import nvfp4_tile, tile
from fp8_compile.kernels.gpu.ahead_of_time import compile_for, facts_of
from fp8_compile.kernels.gpu.catalogue import BLACKWELL
from fp8_compile.kernels.mx_swizzled import unswizzle
from fp8_compile.kernels.nvfp4_swizzled import quantize_nvfp4_swizzled, quantize_nvfp4_swizzled_op
from fp8_compile.kernels.nvfp4_training import quantize_nvfp4

ROWS, TILES = (1, 16), (16, 16)
# block, transpose, rotated, seed, stream, four_over_six
KINDS = {
    "input": (ROWS, False, False, None, 0, False),
    "weight": (TILES, False, False, None, 0, False),
    "weight, transposed": (TILES, True, False, None, 0, False),
    "gradient": (ROWS, False, False, 2**61 + 12345, 0, False),
    "gradient along tokens": (ROWS, True, True, 77, 1, False),
    "input along tokens": (ROWS, True, True, None, 1, False),
    "input, four over six": (ROWS, False, False, None, 0, True),
    "weight, four over six": (TILES, True, False, None, 0, True),
}


def hostile(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(rows, cols, generator=generator) * 2.0 ** torch.randint(-12, 4, (rows, 1), generator=generator)
    x[3], x[4], x[5, :16] = 0.0, 1e-38, 3e38
    x[6, 3], x[17, 20], x[18, 5] = torch.inf, torch.nan, -0.0
    x[20, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # ties, where the scale of the block is 1
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_those_of_the_reference(kind: str, generator: torch.Generator) -> None:
    block, transpose, rotated, seed, stream, four_over_six = KINDS[kind]
    for rows, cols, numbered, enc in ((96, 160, None, 1.0), (64, 64, 48, 300.0)):
        x = hostile(rows, cols, generator)
        k = rows if transpose else cols
        if numbered is not None:  # zeros were added up to a multiple of 32
            (x if transpose else x.t())[numbered:] = 0
        key = None if seed is None else torch.tensor([seed])
        options = (0.25, block, transpose, rotated, key, stream, four_over_six, numbered or k)
        given = x, torch.full((1, 1), enc), *options
        with interpreted(nvfp4_tile, tile):
            codes, scales = nvfp4_tile.quantize_nvfp4_swizzled(*given)
        expected_codes, expected_scales = quantize_nvfp4_swizzled(*given)
        wide, wanted = scales.float(), expected_scales.float()
        assert torch.equal(wide.nan_to_num(-1), wanted.nan_to_num(-1)) and wanted.isnan().sum() in (2, 32)
        outer = codes.shape[0]
        of_block = unswizzle(expected_scales.view(torch.uint8), outer, k // 16).contiguous().view(scales.dtype).float()
        spoilt = of_block.isnan().repeat_interleave(8, 1)  # codes of a block with Inf or NaN do not matter
        assert torch.equal(codes.masked_fill(spoilt, 0), expected_codes.masked_fill(spoilt, 0))


def test_the_operation_gives_the_codes_of_a_cpu_and_their_scales_in_the_hardwares_order(
    generator: torch.Generator,
) -> None:
    x, enc, seed = torch.randn(40, 56, generator=generator), torch.full((1, 1), 100.0), torch.tensor([5])
    filled = torch.nn.functional.pad(x, (0, 8, 0, 24))
    for transpose in (False, True):
        codes, scales = quantize_nvfp4(x, enc, ROWS, transpose, transpose, seed, 1, False)
        rows, half = codes.shape
        options = (1.0, ROWS, transpose, transpose, seed, 1, False, 2 * half)
        ours, flat = quantize_nvfp4_swizzled_op(filled, enc, *options)
        assert torch.equal(ours[:rows, :half], codes) and not ours[:, half:].any()
        here = unswizzle(flat.view(torch.uint8), ours.shape[0], ours.shape[1] // 8)
        assert torch.equal(here[:rows, : half // 8], scales.view(torch.uint8)) and not here[:, half // 8 :].any()


# Kernels whose values a release of Triton keeps on the stack: slower, not wrong (docs/porting.md).
ON_THE_STACK = {"3.9": {"quantize_nvfp4 16x16, transposed, four over six"}}


@pytest.mark.parametrize("target", ["cuda:100", "cuda:120"])
@pytest.mark.parametrize("name", BLACKWELL)
def test_nothing_spills_and_e2m1_is_rounded_by_the_hardwares_instruction(name: str, target: str) -> None:
    compiled = BLACKWELL[name]().compiled(target)
    ptx = compiled.asm["ptx"]
    release = triton.__version__.rpartition(".")[0]
    assert bool(facts_of(compiled).spills) == (name in ON_THE_STACK.get(release, set()))
    assert ("cvt.rn.satfinite.e2m1x2.f32" in ptx) == ("random" not in name)
    assert not any(f"{clamp}.NaN" in ptx for clamp in ("min", "max"))  # beside stores of bytes: triton#11111


def test_a_tile_can_be_squeezed_until_it_spills() -> None:
    entry = BLACKWELL["quantize_nvfp4 1x16, nearest"]()
    assert facts_of(compile_for("cuda:100", entry.kernel, entry.types, entry.constants, num_warps=4, maxnreg=32)).spills
