"""Quantize a matrix with a scale a row; or with a scale a row and its transpose with a scale a column, for both gemms.

    amax          = max |x| over the row, floored at 1e-12
    quant_scale   = F / amax                                F: the largest value of the format
    dequant_scale = 1 / quant_scale + 0 * amax              NaN where the row holds an Inf or NaN
    q             = fp8(clamp(x * quant_scale, -F, F))

x: [R, C] fp32/bf16/fp16, any strides -> q: [R, C] fp8, dequant [R, 1] fp32, and for both layouts q_t: [C, R] fp8,
dequant_t [C, 1] fp32, quantized by the columns of x. Outputs are row-major.

Bytes an element in bf16:
    rows alone    3: 2 read, 1 written, where a row fits into a program's registers (up to LONGEST); 5 beyond
    both          6: 2 read for the amaxes of rows and columns, 2 read again, 1 + 1 written. A column's amax is known
                  when all rows were read, so two reads are the fewest; each layout on its own would take 3 + 5.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import format_of
from ..quantize import quantize
from .tile import magnitude_bits, saturated, scales_of

LONGEST = 8192  # elements of a row that eight warps hold: 32 registers a thread
ROW_WARPS = 8
TILE, TILE_WARPS = 64, 4


@triton.jit
def quantize_rows_kernel(
    x_ptr,
    q_ptr,
    dequant_ptr,
    cols,
    row_stride,
    col_stride,
    LARGEST: tl.constexpr,
    FITS: tl.constexpr,  # the row is one block: read once
    BLOCK: tl.constexpr,
):
    """One row a program."""
    # A tensor may have more than 2**31 elements: offsets are int64 before they are multiplied.
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    if FITS:
        x = tl.load(x_ptr + row * row_stride + c.to(tl.int64) * col_stride, mask=c < cols, other=0.0).to(tl.float32)
        bits = magnitude_bits(x)
    else:
        bits = tl.zeros([BLOCK], tl.int32)
        for start in range(0, cols, BLOCK):
            at = x_ptr + row * row_stride + (start + c).to(tl.int64) * col_stride
            bits = tl.maximum(bits, magnitude_bits(tl.load(at, mask=start + c < cols, other=0.0).to(tl.float32)))
    quant_scale, dequant_scale = scales_of(tl.max(bits, axis=0), LARGEST)
    tl.store(dequant_ptr + row, dequant_scale)
    if FITS:
        q = saturated(x, quant_scale, LARGEST).to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + row * cols + c, q, mask=c < cols)
    else:
        for start in range(0, cols, BLOCK):
            inside = start + c < cols
            at = x_ptr + row * row_stride + (start + c).to(tl.int64) * col_stride
            again = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            q = saturated(again, quant_scale, LARGEST).to(q_ptr.dtype.element_ty)
            tl.store(q_ptr + row * cols + (start + c), q, mask=inside)


@triton.jit
def row_column_amax_kernel(
    x_ptr, row_bits_ptr, column_bits_ptr, rows, cols, row_stride, col_stride, TILE: tl.constexpr
):
    """Raise the amaxes of rows [R] and columns [C], int32 bits that start at 0: one tile a program."""
    tiles_across = tl.cdiv(cols, TILE)
    r = (tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)
    c = (tl.program_id(0) % tiles_across) * TILE + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    at = x_ptr + r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * col_stride
    bits = magnitude_bits(tl.load(at, mask=inside, other=0.0).to(tl.float32))
    tl.atomic_max(row_bits_ptr + r, tl.max(bits, axis=1), mask=r < rows, sem="relaxed")
    tl.atomic_max(column_bits_ptr + c, tl.max(bits, axis=0), mask=c < cols, sem="relaxed")


@triton.jit
def cast_rows_columns_kernel(
    x_ptr,
    row_bits_ptr,
    column_bits_ptr,
    q_ptr,
    q_t_ptr,
    dequant_ptr,
    dequant_t_ptr,
    rows,
    cols,
    row_stride,
    col_stride,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Both casts of one tile a program; the first tile of a row or column also writes its scales."""
    tiles_across = tl.cdiv(cols, TILE)
    down, across = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    r = down * TILE + tl.arange(0, TILE)
    c = across * TILE + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    wide_r, wide_c = r.to(tl.int64), c.to(tl.int64)
    x = tl.load(x_ptr + wide_r[:, None] * row_stride + wide_c[None, :] * col_stride, mask=inside, other=0.0)
    x = x.to(tl.float32)
    row_scale, dequant = scales_of(tl.load(row_bits_ptr + r, mask=r < rows, other=0), LARGEST)
    column_scale, dequant_t = scales_of(tl.load(column_bits_ptr + c, mask=c < cols, other=0), LARGEST)
    tl.store(dequant_ptr + r, dequant, mask=(r < rows) & (across == 0))
    tl.store(dequant_t_ptr + c, dequant_t, mask=(c < cols) & (down == 0))

    codes = saturated(x, row_scale[:, None], LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
    tl.store(
        q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + wide_r[:, None] * cols + c[None, :], codes, mask=inside
    )
    # FP8 goes out through an integer view: Triton may miscompile transposed FP8 stores (triton#11111).
    codes_t = saturated(x, column_scale[None, :], LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
    inside_t = (c < cols)[:, None] & (r < rows)[None, :]
    q_t_bytes = q_t_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(q_t_bytes + wide_c[:, None] * rows + r[None, :], tl.trans(codes_t), mask=inside_t)


def quantize_rows(x: Tensor, dtype: torch.dtype, longest: int = LONGEST) -> tuple[Tensor, Tensor]:
    """q and its dequant scales [R, 1]."""
    rows, cols = x.shape
    q = torch.empty(rows, cols, dtype=dtype, device=x.device)
    dequant = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = min(triton.next_power_of_2(max(1, cols)), longest)
        quantize_rows_kernel[(rows,)](
            x,
            q,
            dequant,
            cols,
            *x.stride(),
            LARGEST=format_of(dtype).max,
            FITS=cols <= block,
            BLOCK=block,
            num_warps=ROW_WARPS,
        )
    return q, dequant


def quantize_rows_columns(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, its dequant scales [R, 1], q_t, its dequant scales [C, 1]."""
    rows, cols = x.shape
    q = torch.empty(rows, cols, dtype=dtype, device=x.device)
    q_t = torch.empty(cols, rows, dtype=dtype, device=x.device)
    if not x.numel():
        return *reference_rows(x, dtype), *reference_rows(x.t(), dtype)
    row_bits = torch.zeros(rows, dtype=torch.int32, device=x.device)
    column_bits = torch.zeros(cols, dtype=torch.int32, device=x.device)
    dequant = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    dequant_t = torch.empty(cols, 1, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, TILE) * triton.cdiv(cols, TILE),)
    shape = (rows, cols, *x.stride())
    row_column_amax_kernel[grid](x, row_bits, column_bits, *shape, TILE=TILE, num_warps=TILE_WARPS)
    outputs = (q, q_t, dequant, dequant_t)
    largest = format_of(dtype).max
    cast_rows_columns_kernel[grid](
        x, row_bits, column_bits, *outputs, *shape, LARGEST=largest, TILE=TILE, num_warps=TILE_WARPS
    )
    return q, dequant, q_t, dequant_t


def reference_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows alone in plain PyTorch."""
    return quantize(x, dtype, (1, -1))


def reference_rows_columns(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both layouts in plain PyTorch: the matrix and its transpose, quantized on their own."""
    return *reference_rows(x, dtype), *reference_rows(x.t(), dtype)
