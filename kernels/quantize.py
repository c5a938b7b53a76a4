"""Quantize a matrix to FP8 with one scale per block.

    amax[i, j]          = max |x| over block (i, j), floored at 1e-12
    quant_scale[i, j]   = F / amax[i, j]                        F: the largest value of the format
    q                   = fp8(clamp(x * quant_scale, -F, F))
    dequant_scale[i, j] = 1 / quant_scale[i, j] + 0 * amax[i, j]

x: [R, C] fp32/bf16/fp16 -> q: [R, C] fp8, row-major; dequant_scale: [ceil(R/r), ceil(C/c)] fp32.

``block`` (r, c) is the recipe: (-1, -1) the whole tensor, (1, -1) a row, (-1, 1) a column, (1, 128) and
(128, 128) blocks; -1 stands for the whole dimension. ``0 * amax`` makes the scale NaN where the block holds
an Inf or NaN: the saturating cast alone would turn Inf into F and hide an overflow from a loss scaler.
"""

from __future__ import annotations

from typing import Sequence

import torch

from .define_op import define
from .formats import format_of
from .operands import ANY, check

AMAX_FLOOR = 1e-12
Block = Sequence[int]
WHOLE = -1  # a block that spans its dimension
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


def quantize(x: torch.Tensor, dtype: torch.dtype, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula above in plain PyTorch: the reference, and what the graph is lowered to."""
    quant_scale, dequant_scale = scales(x, dtype, block)
    return cast(x, quant_scale, dtype, block), dequant_scale


def scales(x: torch.Tensor, dtype: torch.dtype, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """The first half: ``quant_scale`` and ``dequant_scale`` from the values themselves."""
    amax = block_amax(x, block).clamp_min(AMAX_FLOOR)
    quant_scale = format_of(dtype).max / amax
    return quant_scale, quant_scale.reciprocal() + amax * 0.0


def cast(x: torch.Tensor, quant_scale: torch.Tensor, dtype: torch.dtype, block: Block) -> torch.Tensor:
    """The second half: scale, saturate, round to nearest even."""
    largest = format_of(dtype).max
    scaled = x.contiguous().to(torch.float32) * spread(quant_scale, x.shape, block)
    return scaled.clamp(-largest, largest).to(dtype)


def dequantize(q: torch.Tensor, dequant_scale: torch.Tensor, block: Block) -> torch.Tensor:
    """``q * dequant_scale`` in FP32."""
    return q.to(torch.float32) * spread(dequant_scale, q.shape, block)


def block_amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """Largest magnitude of each block in FP32, [ceil(R/r), ceil(C/c)]; NaN where the block has one."""
    rows, cols = x.shape
    magnitude = x.abs()
    if not is_tiled(block):
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # SymPy takes a second to import

        dims = [dim for dim in (0, 1) if block[dim] == WHOLE]
        if any(not statically_known_true(x.shape[dim] > 0) for dim in dims):
            # Perhaps empty: a zero more along the reduced dimensions changes no maximum, and there always is one.
            magnitude = torch.nn.functional.pad(magnitude, (0, int(1 in dims), 0, int(0 in dims)))
        return magnitude.amax(dims, keepdim=True).to(torch.float32)
    block_rows, block_cols = block
    padded = torch.nn.functional.pad(magnitude, (0, -cols % block_cols, 0, -rows % block_rows))
    tiles = padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // block_cols, block_cols)
    return tiles.amax((1, 3)).to(torch.float32)


def spread(scale: torch.Tensor, shape: torch.Size, block: Block) -> torch.Tensor:
    """Give every element of a [R, C] matrix its block's scale; broadcasting does it where a block is a line."""
    if not is_tiled(block):
        return scale
    (rows, cols), (block_rows, block_cols) = shape, block
    tiles = scale[:, None, :, None].expand(scale.shape[0], block_rows, scale.shape[1], block_cols)
    return tiles.reshape(scale.shape[0] * block_rows, scale.shape[1] * block_cols)[:rows, :cols]


def is_tiled(block: Block) -> bool:
    """True if blocks are smaller than a row or a column."""
    return WHOLE not in block


def _checked(x: torch.Tensor, dtype: torch.dtype, block: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    check("quantize", "x", x, HIGH_PRECISION, (ANY, ANY))
    return quantize(x.contiguous(), dtype, block)


def _fake(x: torch.Tensor, dtype: torch.dtype, block: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = [1 if b == WHOLE else (size + b - 1) // b for size, b in zip(x.shape, block)]
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(sizes, dtype=torch.float32)


# The op stands for one quantize in the graph until it is lowered: it can be shared, counted and read in a dump. On a
# CPU it comes back after the split, as one call of C++, where nothing else reads the quantize scale.
quantize_op = define(
    "quantize(Tensor x, ScalarType dtype, int[2] block) -> (Tensor q, Tensor dequant_scale)",
    lambda x, dtype, block: quantize(x.contiguous(), dtype, block),
    _fake,
    cpu=_checked,
)
