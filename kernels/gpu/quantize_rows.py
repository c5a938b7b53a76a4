"""Quantize a matrix with one scale per row, and for both gemms also its transpose with one scale per column.

    amax          = max |x| over the row, floored at 1e-12
    quant_scale   = F / amax                                F: the largest value of the format
    dequant_scale = 1 / quant_scale + 0 * amax              NaN where the row holds an Inf or NaN
    q             = fp8(clamp(x * quant_scale, -F, F))

x: [R, C] fp32/bf16/fp16, any strides -> q: [R, C] fp8, dequant [R, 1] fp32, and for both layouts q_t: [C, R'] fp8,
dequant_t [C, 1] fp32, quantized by the columns of x. Outputs are row-major, q_t with zeros beyond R.

Bytes per element in bf16:
    rows alone    3: 2 read, 1 written, where a row fits into a program's registers (up to LONGEST); 5 beyond
    both          6: 2 read for the amaxes of rows and columns, 2 read again, 1 + 1 written. A column's amax is known
                  when all rows were read, so two reads are the fewest; each layout on its own would take 3 + 5.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_compile.kernels.formats import format_of
from fp8_compile.kernels.quantize import WHOLE, quantize
from fp8_compile.kernels.quantize_both import Both, empty_results, quantize_both

from .tile import VIA, loaded, magnitude_bits, saturated, scales_of

BLOCK_OF_ROWS = (1, WHOLE)
LONGEST = 8192  # elements of a row that eight warps hold: 32 registers per thread
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
    VIA: tl.constexpr,
    FITS: tl.constexpr,  # the row is one block: read once
    BLOCK: tl.constexpr,
):
    """One row a program."""
    # A tensor may have more than 2**31 elements: offsets are int64 before they are multiplied.
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    if FITS:
        x = loaded(tl.load(x_ptr + row * row_stride + c.to(tl.int64) * col_stride, mask=c < cols, other=0.0), VIA)
        bits = magnitude_bits(x)
    else:
        bits = tl.zeros([BLOCK], tl.int32)
        for start in range(0, cols, BLOCK):
            at = x_ptr + row * row_stride + (start + c).to(tl.int64) * col_stride
            bits = tl.maximum(bits, magnitude_bits(loaded(tl.load(at, mask=start + c < cols, other=0.0), VIA)))
    quant_scale, dequant_scale = scales_of(tl.max(bits, axis=0), LARGEST)
    tl.store(dequant_ptr + row, dequant_scale)
    if FITS:
        q = saturated(x, quant_scale, LARGEST).to(q_ptr.dtype.element_ty)
        tl.store(q_ptr + row * cols + c, q, mask=c < cols)
    else:
        for start in range(0, cols, BLOCK):
            inside = start + c < cols
            at = x_ptr + row * row_stride + (start + c).to(tl.int64) * col_stride
            again = loaded(tl.load(at, mask=inside, other=0.0), VIA)
            q = saturated(again, quant_scale, LARGEST).to(q_ptr.dtype.element_ty)
            tl.store(q_ptr + row * cols + (start + c), q, mask=inside)


@triton.jit
def row_column_amax_kernel(
    x_ptr,
    bits_ptr,
    rows,
    cols,
    row_stride,
    col_stride,
    VIA: tl.constexpr,
    ALONG_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Raise the amaxes of rows [R] and of columns [C] after them: int32 bits that start at 0. One tile per program."""
    tiles_across = tl.cdiv(cols, TILE)
    r = (tl.program_id(0) // tiles_across) * TILE + tl.arange(0, TILE)
    c = (tl.program_id(0) % tiles_across) * TILE + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    at = x_ptr + r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * col_stride
    bits = magnitude_bits(loaded(tl.load(at, mask=inside, other=0.0), VIA))
    if ALONG_ROWS:
        tl.atomic_max(bits_ptr + r, tl.max(bits, axis=1), mask=r < rows, sem="relaxed")
    tl.atomic_max(bits_ptr + rows + c, tl.max(bits, axis=0), mask=c < cols, sem="relaxed")


@triton.jit
def cast_rows_columns_kernel(
    x_ptr,
    bits_ptr,
    q_ptr,
    q_t_ptr,
    dequant_ptr,
    dequant_t_ptr,
    rows,
    cols,
    row_stride,
    col_stride,
    padded,  # length of a row of q_t
    LARGEST: tl.constexpr,
    VIA: tl.constexpr,
    ALONG_ROWS: tl.constexpr,  # write q, too; its pointers are not used otherwise
    TILE: tl.constexpr,
):
    """Both casts of one tile per program; the first tile of a row or column also writes its scales."""
    tiles_across = tl.cdiv(cols, TILE)
    down, across = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    r = down * TILE + tl.arange(0, TILE)
    c = across * TILE + tl.arange(0, TILE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    wide_r, wide_c = r.to(tl.int64), c.to(tl.int64)
    x = tl.load(x_ptr + wide_r[:, None] * row_stride + wide_c[None, :] * col_stride, mask=inside, other=0.0)
    x = loaded(x, VIA)
    # FP8 goes out through an integer view: Triton may miscompile transposed FP8 stores (triton#11111).
    if ALONG_ROWS:
        row_scale, dequant = scales_of(tl.load(bits_ptr + r, mask=r < rows, other=0), LARGEST)
        tl.store(dequant_ptr + r, dequant, mask=(r < rows) & (across == 0))
        codes = saturated(x, row_scale[:, None], LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
        q_bytes = q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(q_bytes + wide_r[:, None] * cols + c[None, :], codes, mask=inside)
    column_scale, dequant_t = scales_of(tl.load(bits_ptr + rows + c, mask=c < cols, other=0), LARGEST)
    tl.store(dequant_t_ptr + c, dequant_t, mask=(c < cols) & (down == 0))
    codes_t = saturated(x, column_scale[None, :], LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
    codes_t = tl.where(inside, codes_t, 0)  # beyond the rows, where a scale that is NaN would make NaN of zero
    inside_t = (c < cols)[:, None] & (r < padded)[None, :]
    q_t_bytes = q_t_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(q_t_bytes + wide_c[:, None] * padded + r[None, :], tl.trans(codes_t), mask=inside_t)


def quantize_rows(
    x: Tensor, dtype: torch.dtype, longest: int = LONGEST, via: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """q and its dequant scales [R, 1]."""
    rows, cols = x.shape
    q = torch.empty(rows, cols, dtype=dtype, device=x.device)
    dequant = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        constants = row_constants(cols, dtype, longest, via)
        quantize_rows_kernel[(rows,)](x, q, dequant, cols, *x.stride(), **constants, num_warps=ROW_WARPS)
    return q, dequant


def row_constants(
    cols: int, dtype: torch.dtype, longest: int = LONGEST, via: torch.dtype | None = None
) -> dict[str, Any]:
    """What the kernel for rows alone is compiled for; a length known only when it runs is taken in steps."""
    block = min(triton.next_power_of_2(max(1, cols)), longest) if isinstance(cols, int) else longest
    fits = isinstance(cols, int) and cols <= block
    return {"LARGEST": format_of(dtype).max, "VIA": VIA[via], "FITS": fits, "BLOCK": block}


def quantize_rows_columns(
    x: Tensor, dtype: torch.dtype, multiple: int = 1, via: torch.dtype | None = None, *, along_rows: bool = True
) -> Both:
    """q, its dequant scales [R, 1], q_t, its dequant scales [C, 1]; the first two not written unless asked for."""
    if not x.numel():
        return reference_rows_columns(x, dtype, multiple, via)
    q, dequant, q_t, dequant_t = results = empty_results(x, dtype, BLOCK_OF_ROWS, multiple)
    programs, *sizes, padded = tile_sizes(x, multiple)
    bits = torch.zeros(sum(x.shape), dtype=torch.int32, device=x.device)
    constants = tile_constants(via, along_rows)
    row_column_amax_kernel[(programs,)](x, bits, *sizes, **constants, num_warps=TILE_WARPS)
    outputs, largest = (q, q_t, dequant, dequant_t), format_of(dtype).max
    cast_rows_columns_kernel[(programs,)](
        x, bits, *outputs, *sizes, padded, LARGEST=largest, **constants, num_warps=TILE_WARPS
    )
    return results


def tile_sizes(x: Tensor, multiple: int) -> tuple[int, ...]:
    """Programs, rows, cols, row_stride, col_stride, padded."""
    if TILE % multiple:
        raise ValueError(f"expected a multiple that divides {TILE}, so that a tile reaches to it; got {multiple}")
    rows, cols = x.shape
    programs = (rows + TILE - 1) // TILE * ((cols + TILE - 1) // TILE)
    return programs, rows, cols, x.stride(0), x.stride(1), rows + -rows % multiple


def tile_constants(via: torch.dtype | None = None, along_rows: bool = True) -> dict[str, Any]:
    """What both kernels for columns are compiled for."""
    return {"VIA": VIA[via], "ALONG_ROWS": along_rows, "TILE": TILE}


def reference_rows(x: Tensor, dtype: torch.dtype, via: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The rows alone in plain PyTorch."""
    return quantize(x if via is None else x.to(via), dtype, BLOCK_OF_ROWS)


def reference_rows_columns(
    x: Tensor, dtype: torch.dtype, multiple: int = 1, via: torch.dtype | None = None
) -> Both:
    """Both layouts in plain PyTorch: the matrix and its transpose, quantized on their own."""
    return quantize_both(x, dtype, BLOCK_OF_ROWS, multiple, via)
