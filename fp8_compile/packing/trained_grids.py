"""Quantize weights as the training of the model did: the codes and scales of a training forward now.

    recipe       weight                                                      input
    delayed      FP8, one scale for the tensor, from its history             FP8, the static scale of its history
    rowwise      FP8, one scale per row                                      FP8, one scale per row
    blockwise    FP8, one scale per 128 x 128                                FP8, one scale per 1 x 128
    mxfp8        MXFP8, a power of two per 32 x 32                           MXFP8, a power of two per 1 x 32
    nvfp4        NVFP4, a scale per 16 x 16, global scale of its history     NVFP4, per 1 x 16, the same

A history is the scaling state's. With global_scale="exact" the global scales are the tensors' own.
"""

from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch import Tensor, nn

from fp8_compile.kernels import mx_weight
from fp8_compile.kernels.delayed_scaling import cast_delayed, first_scale
from fp8_compile.kernels.formats import E4M3
from fp8_compile.kernels.fp8_blocks import BLOCK, FP8Blocks
from fp8_compile.kernels.fp8_weight import FP8Weight
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.kernels.nvfp4_training import FOUR_OF_SIX, SIZE, global_scale, quantize_nvfp4_op
from fp8_compile.kernels.quantize import WHOLE, block_amax, quantize_op
from fp8_compile.passes.graph.weight_grid import POWER_BLOCKS
from fp8_compile.scaling.training_grids import TrainingGrid

from .formats import FP8, FP8_BLOCKS, MXFP8, NVFP4, Format
from .packed_linear import PackedLinear
from .packed_nvfp4_inputs import NVFP4InputsLinear
from .packed_weight import Matrix

Quantize = Callable[[Tensor, TrainingGrid, Tensor | None], Matrix]  # of a matrix, with its quant_scale or its own


class Recipe(NamedTuple):
    """What packs the weights of one recipe."""

    format: Format
    activations: str | None
    quantize: Quantize


def recipe_of(name: str, grid: TrainingGrid) -> Recipe:
    """What packs a weight that was trained so; a ValueError that names it where no packed format holds its grid."""
    if grid.recipe == POWER_BLOCKS:
        raise ValueError(
            f"{name}: on this GPU recipe='blockwise' has scales that are powers of two, which no packed format rounds "
            "inputs by; train with recipe='mxfp8', or pack without scales='training'"
        )
    if grid.recipe not in RECIPES:
        raise ValueError(
            f"{name}: recipe={grid.recipe!r} takes the scale of every input from the input as a whole, which no packed "
            f"format does; train with one of {', '.join(map(repr, RECIPES))}, or pack without scales='training'"
        )
    if grid.format not in ("e4m3", "e2m1"):
        raise ValueError(
            f"{name}: training quantizes it to {grid.format}, and packed weights are e4m3 or e2m1; train with "
            "forward_format='e4m3', or pack without scales='training'"
        )
    return RECIPES[grid.recipe]


def quantized(name: str, matrix: Tensor, grid: TrainingGrid, scale: Tensor | None) -> Matrix:
    """An [N, K] matrix as training has it; ``scale`` is the quant_scale of its history."""
    w = matrix.detach() if grid.via is None else matrix.detach().to(grid.via)
    if not bool(w.isfinite().all()):
        raise ValueError(f"{name}: weights are Inf or NaN, expected finite ones; repair them, or exclude the layer")
    return RECIPES[grid.recipe].quantize(w.contiguous(), grid, scale)


def input_scale(grids: list[TrainingGrid]) -> Tensor | None:
    """The static scale of a layer's inputs (what codes are multiplied by), fp32 []; of several uses, the one that
    reaches furthest. None: inputs have scales of their own."""
    found = [scale.reciprocal() for grid in grids if (scale := grid.input_scale()) is not None]
    if not found:
        return None
    largest = torch.stack(found).amax()
    return largest * (1.0 / FOUR_OF_SIX) if grids[0].four_over_six else largest


def convert(
    layer: nn.Module, weight: Matrix, recipe: Recipe, dtype: torch.dtype, scale: Tensor | None, grid: TrainingGrid
) -> PackedLinear:
    """Make a linear layer a packed one, which rounds its inputs as training does."""
    if isinstance(weight, NVFP4Weight):
        NVFP4InputsLinear.convert(layer, weight, dtype, None, scale, four_over_six=grid.four_over_six)
    else:
        recipe.format.linear.convert(layer, weight, dtype, recipe.activations, scale)
    assert isinstance(layer, PackedLinear)
    return layer


def _delayed(w: Tensor, grid: TrainingGrid, scale: Tensor | None) -> Matrix:
    if scale is None:
        amax = block_amax(w, (WHOLE, WHOLE)).reshape(())
        scale = first_scale(torch.zeros_like(amax), amax, E4M3.max)
    codes = cast_delayed(w, scale.to(w.device), E4M3.dtype)
    return FP8Weight(codes, scale.to(w.device).reciprocal().expand(w.shape[0]).contiguous())


def _rowwise(w: Tensor, grid: TrainingGrid, scale: Tensor | None) -> Matrix:
    codes, scales = quantize_op(w, E4M3.dtype, [1, WHOLE])
    return FP8Weight(codes, scales.reshape(-1))


def _blockwise(w: Tensor, grid: TrainingGrid, scale: Tensor | None) -> Matrix:
    return FP8Blocks(*quantize_op(w, E4M3.dtype, [BLOCK, BLOCK]))


def _mxfp8(w: Tensor, grid: TrainingGrid, scale: Tensor | None) -> Matrix:
    return mx_weight.quantize(w, tiles=True)


def _nvfp4(w: Tensor, grid: TrainingGrid, scale: Tensor | None) -> Matrix:
    enc = global_scale(w)[0] if scale is None else scale.to(w.device).reshape(1, 1)
    if grid.four_over_six:
        enc = enc * FOUR_OF_SIX
    codes, tiles = quantize_nvfp4_op(w, enc, [SIZE, SIZE], False, False, None, 0, grid.four_over_six)
    rows = tiles.view(torch.uint8).repeat_interleave(SIZE, 0)[: w.shape[0]].view(tiles.dtype)
    return NVFP4Weight(codes, rows.contiguous(), enc.reciprocal().reshape(()), w.shape[1])


RECIPES = {
    "delayed": Recipe(FP8, "fp8", _delayed),
    "rowwise": Recipe(FP8, "fp8", _rowwise),
    "blockwise": Recipe(FP8_BLOCKS, "fp8", _blockwise),
    "mxfp8": Recipe(MXFP8, "mxfp8", _mxfp8),
    "nvfp4": Recipe(NVFP4, None, _nvfp4),
}
