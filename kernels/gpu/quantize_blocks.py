"""Quantize a matrix with one scale per block of 128, in both layouts or one of them, with one read.

    amax          = max |x| over the block, floored at 1e-12
    quant_scale   = F / amax                                F: the largest value of the format
    dequant_scale = 1 / quant_scale + 0 * amax              NaN where the block holds an Inf or NaN
    q             = fp8(clamp(x * quant_scale, -F, F))

    1 x 128 (inputs, gradients):  q with a block along each row of x, q_t with a block along each row of x^T
    128 x 128 (weights):          q and q_t = transpose(q) share their scales

x: [R, C] fp32/bf16/fp16, any strides -> q: [R, C] fp8; q_t: [C, R'] fp8, both row-major, zeros beyond R; dequant scales
fp32: 1 x 128 gives [R, ceil(C/128)] and [C, ceil(R/128)], 128 x 128 gives [ceil(R/128), ceil(C/128)] and its transpose,
laid out as in ``quantize_both.py``. 4 bytes per element in bf16: 2 read, 1 + 1 written; 3 for one layout.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_compile.kernels.formats import format_of
from fp8_compile.kernels.quantize_both import Both, empty_results, quantize_both

from .tile import VIA, loaded, magnitude_bits, saturated, scales_of

SIZE = 128  # of a block
# 32 elements per thread on NVIDIA. With 8 warps it takes 190 registers instead of 121, and half as many warps run at
# once.
NUM_WARPS = 16


@triton.jit
def quantize_blocks_kernel(
    x_ptr,
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
    SQUARE: tl.constexpr,  # one scale per tile, instead of one for each of its rows and columns
    ALONG_ROWS: tl.constexpr,  # write q; its pointers are not used otherwise
    ALONG_COLUMNS: tl.constexpr,  # write q_t
    SIZE: tl.constexpr,
):
    """One SIZE x SIZE tile per program, tiles along a row first."""
    tiles_across, tiles_down = tl.cdiv(cols, SIZE), tl.cdiv(rows, SIZE)
    down, across = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    r = down * SIZE + tl.arange(0, SIZE)
    c = across * SIZE + tl.arange(0, SIZE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    # A tensor may have more than 2**31 elements: offsets are int64 before they are multiplied.
    wide_r, wide_c = r.to(tl.int64), c.to(tl.int64)
    wide_down, wide_across = down.to(tl.int64), across.to(tl.int64)
    x = tl.load(x_ptr + wide_r[:, None] * row_stride + wide_c[None, :] * col_stride, mask=inside, other=0.0)
    x = loaded(x, VIA)
    bits = magnitude_bits(x)

    # FP8 goes out through an integer view: Triton may miscompile transposed FP8 stores (triton#11111).
    if SQUARE:
        quant_scale, dequant_scale = scales_of(tl.max(tl.max(bits, axis=1), axis=0), LARGEST)
        codes = saturated(x, quant_scale, LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
        codes_t = codes
        if ALONG_ROWS:
            _store_in_line(dequant_ptr, wide_down, across, tiles_across, dequant_scale)
        if ALONG_COLUMNS:
            _store_in_line(dequant_t_ptr, wide_across, down, tiles_down, dequant_scale)
    else:
        if ALONG_ROWS:
            quant_scale, dequant_scale = scales_of(tl.max(bits, axis=1), LARGEST)
            tl.store(dequant_ptr + wide_across * rows + r, dequant_scale, mask=r < rows)
            codes = saturated(x, quant_scale[:, None], LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
        if ALONG_COLUMNS:
            quant_scale, dequant_scale = scales_of(tl.max(bits, axis=0), LARGEST)
            tl.store(dequant_t_ptr + wide_down * cols + c, dequant_scale, mask=c < cols)
            codes_t = saturated(x, quant_scale[None, :], LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
    if ALONG_ROWS:
        q_bytes = q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.store(q_bytes + wide_r[:, None] * cols + c[None, :], codes, mask=inside)
    if ALONG_COLUMNS:
        q_t_bytes = q_t_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        codes_t = tl.where(inside, codes_t, 0)  # beyond the rows, where a scale that is NaN would make NaN of zero
        inside_t = (c < cols)[:, None] & (r < padded)[None, :]
        tl.store(q_t_bytes + wide_c[:, None] * padded + r[None, :], tl.trans(codes_t), mask=inside_t)


@triton.jit
def _store_in_line(ptr, line, at, tiles, dequant_scale):
    """The scale of a tile, in lines whose length is a multiple of 4; the last tile of one fills it up with zeros."""
    i = tl.arange(0, 4)
    length = tl.cdiv(tiles, 4) * 4
    wanted = (i == 0) | ((at == tiles - 1) & (at + i < length))
    tl.store(ptr + line * length + at + i, tl.where(i == 0, dequant_scale, 0.0), mask=wanted)


def quantize_blocks(
    x: Tensor,
    dtype: torch.dtype,
    square: bool,
    multiple: int = 1,
    via: torch.dtype | None = None,
    *,
    along_rows: bool = True,
    along_columns: bool = True,
) -> Both:
    """q, its dequant scales, q_t, its dequant scales; not written what is not asked for."""
    q, dequant, q_t, dequant_t = results = empty_results(x, dtype, block_of(square), multiple)
    if x.numel():
        programs, *sizes = launch_sizes(x, multiple)
        constants = launch_constants(dtype, square, via, along_rows, along_columns)
        quantize_blocks_kernel[(programs,)](x, q, q_t, dequant, dequant_t, *sizes, **constants, num_warps=NUM_WARPS)
    return results


def launch_sizes(x: Tensor, multiple: int) -> tuple[int, ...]:
    """Programs, rows, cols, row_stride, col_stride, padded."""
    if SIZE % multiple:
        raise ValueError(f"expected a multiple that divides {SIZE}, so that a tile reaches to it; got {multiple}")
    rows, cols = x.shape
    programs = (rows + SIZE - 1) // SIZE * ((cols + SIZE - 1) // SIZE)
    return programs, rows, cols, x.stride(0), x.stride(1), rows + -rows % multiple


def launch_constants(
    dtype: torch.dtype,
    square: bool,
    via: torch.dtype | None = None,
    along_rows: bool = True,
    along_columns: bool = True,
) -> dict[str, Any]:
    """What the kernel is compiled for."""
    along = {"ALONG_ROWS": along_rows, "ALONG_COLUMNS": along_columns}
    return {"LARGEST": format_of(dtype).max, "VIA": VIA[via], "SQUARE": square, **along, "SIZE": SIZE}


def block_of(square: bool) -> tuple[int, int]:
    return (SIZE, SIZE) if square else (1, SIZE)


def reference(x: Tensor, dtype: torch.dtype, square: bool, multiple: int = 1, via: torch.dtype | None = None) -> Both:
    """The same in plain PyTorch: the matrix and its transpose, quantized on their own."""
    return quantize_both(x, dtype, block_of(square), multiple, via)
