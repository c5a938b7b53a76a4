"""MXFP8 as gemms of a Blackwell GPU read it: the codes of ``mxfp8.py``, and its scales where the hardware wants them.

    q, s        = quantize_mx(x, block)                                       the formulas of mxfp8.py, x: [R, C]
    scale       = swizzle(s, one row of scales per row of x)                  block (1, 32) or (32, 32): K along C
    scale_t     = swizzle(s transposed, one row of scales per column of x)    block (32, 1) or (32, 32): K along R
    swizzle: S[r, c] of [outer, K/32] goes to byte
             ((r // 128) * ceil(K/32 / 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
             of roundup(outer, 128) * roundup(K/32, 4) bytes; those that no S goes to are 0

x: [R, C] fp32/bf16/fp16 -> q: [R, C] e4m3, row by row, or with ``transposed`` column by column, for gemms that read an
operand only with K contiguous; scale, scale_t: flat uint8, empty where the block has no such direction.

A tile of 32x32 serves both directions with one copy of the codes: each of its scales is repeated over 32 rows in
``scale`` and over 32 columns in ``scale_t``. On a GPU this operation is a store
(``kernels/inductor/mx_swizzled.py``), which Inductor fuses into whatever computes x: nothing is read again, and the
permutation of the scales costs nothing.

    y = left @ right + bias + added                of dequantized operands; scales flat as above, along K on both sides
"""

from __future__ import annotations

import torch
from torch import Tensor

from .define_op import define
from .mxfp8 import BLOCKS, SIZE, mx_mm, quantize_mx
from .operands import ANY, check, check_value
from .quantize import HIGH_PRECISION, Block

ROWS, COLUMNS = 128, 4  # of scales that the hardware reads at once
PIECE = ROWS * COLUMNS
WIDE = 128  # values of a block of recipe="blockwise"


def scales_size(outer: int, blocks: int) -> int:
    """How many bytes the swizzled scales of [outer, blocks] take."""
    return (outer + ROWS - 1) // ROWS * ROWS * ((blocks + COLUMNS - 1) // COLUMNS * COLUMNS)


def swizzle(scale: Tensor) -> Tensor:
    """[outer, blocks] -> flat, in the hardware's order."""
    outer, blocks = scale.shape
    padded = torch.nn.functional.pad(scale, (0, -blocks % COLUMNS, 0, -outer % ROWS))
    pieces = padded.view(-(-outer // ROWS), 4, 32, -(-blocks // COLUMNS), COLUMNS)
    return pieces.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: Tensor, outer: int, blocks: int) -> Tensor:
    """The inverse of :func:`swizzle`."""
    pieces = flat.view(-(-outer // ROWS), -(-blocks // COLUMNS), 32, 4, COLUMNS)
    padded = pieces.permute(0, 3, 2, 1, 4).reshape(-(-outer // ROWS) * ROWS, -1)
    return padded[:outer, :blocks]


def directions(block: Block) -> tuple[bool, bool]:
    """Whether a block has scales for K along the columns' index, and for K along the rows' index."""
    return block[1] in (SIZE, WIDE), block[0] in (SIZE, WIDE)


def quantize_mx_swizzled(x: Tensor, block: Block, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The first formulas above in plain PyTorch."""
    q, s = quantize_mx(x, block)
    along_columns, along_rows = directions(block)
    rows, cols = x.shape
    empty = s.new_empty(0)
    scale = swizzle(s.repeat_interleave(block[0], 0)[:rows]) if along_columns else empty
    scale_t = swizzle(s.t().repeat_interleave(block[1], 0)[:cols]) if along_rows else empty
    if transposed:
        q = q.view(torch.uint8).t().contiguous().view(q.dtype).t()
    return q, scale, scale_t


def swizzled_mx_mm(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    added: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The last formula above in plain PyTorch."""
    (m, k), n = left.shape, right.shape[1]
    blocks = -(-k // SIZE)
    scales = unswizzle(scale_left, m, blocks), unswizzle(scale_right, n, blocks).t()
    product = mx_mm(left, right, *scales, bias, torch.float32)
    return (product if added is None else product + added).to(out_dtype)


def quantize_wide_swizzled(x: Tensor, block: Block, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The same for blocks of 128, whose scale is repeated for each 32 values along K: blockwise with scales that are
    powers of two. Of plain operations, which Inductor fuses as far as it can."""
    q, s = quantize_mx(x, block)
    (rows, cols), empty = x.shape, s.new_empty(0)
    scale, scale_t = empty, empty
    if block[1] == WIDE:
        scale = swizzle(s.repeat_interleave(block[0], 0)[:rows].repeat_interleave(WIDE // SIZE, 1))
    if block[0] == WIDE:
        scale_t = swizzle(s.t().repeat_interleave(block[1], 0)[:cols].repeat_interleave(WIDE // SIZE, 1))
    if transposed:
        q = q.view(torch.uint8).t().contiguous().view(q.dtype).t()
    return q, scale, scale_t


def _fake(x: Tensor, block: Block, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = x.shape
    along_columns, along_rows = directions(block)
    sizes = (
        scales_size(rows, (cols + SIZE - 1) // SIZE) if along_columns else 0,
        scales_size(cols, (rows + SIZE - 1) // SIZE) if along_rows else 0,
    )
    strides = (1, rows) if transposed else (cols, 1)
    q = torch.empty_strided((rows, cols), strides, dtype=torch.float8_e4m3fn, device=x.device)
    scale, scale_t = (torch.empty(size, dtype=torch.uint8, device=x.device) for size in sizes)
    return q, scale, scale_t


def _checked(x: Tensor, block: Block, transposed: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    check("quantize_mx_swizzled", "x", x, HIGH_PRECISION, (ANY, ANY))
    check_value("quantize_mx_swizzled", "block", tuple(block), BLOCKS)
    return quantize_mx_swizzled(x, block, transposed)


quantize_mx_swizzled_op = define(
    "quantize_mx_swizzled(Tensor x, int[2] block, bool transposed=False) -> (Tensor q, Tensor scale, Tensor scale_t)",
    _checked,
    _fake,
)
