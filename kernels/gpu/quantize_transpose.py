"""Quantize a matrix by a known scale into both layouts and record its amax: one read, two writes, one atomic a tile.

    q    = fp8(clamp(x * quant_scale, -F, F) + 0 * x)      F: the largest value of the format
    q_t  = transpose(q)
    amax = max(amax, max |x|)                              -1 before anything was recorded; NaN wins over Inf

x: [R, C] fp32/bf16/fp16, any strides; quant_scale, amax: one fp32 each
-> q: [R, C] fp8 row-major; q_t: [C, R] fp8 row-major; amax in place.

``0 * x`` makes Inf a NaN: the saturating cast alone would turn it into F and hide an overflow from a loss scaler.
For a gradient in bf16 that is 4 bytes an element; casting it twice and reading it again for the amax would be 8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_compile.kernels.delayed_scaling import cast_delayed
from fp8_compile.kernels.formats import format_of

from .tile import largest_magnitude, magnitude_bits, record_amax, saturated

# 64 x 64: a thread of four warps holds 32 elements, two 16-byte stores of each layout, and the rows of both outputs are
# written in pieces of 64 bytes, two whole sectors of an NVIDIA cache line.
BLOCK_R, BLOCK_C, NUM_WARPS = 64, 64, 4


@triton.jit
def quantize_transpose_kernel(
    x_ptr,
    quant_scale_ptr,
    q_ptr,
    q_t_ptr,
    amax_ptr,
    rows,
    cols,
    row_stride,
    col_stride,
    LARGEST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One tile a program, tiles along a row first: grid (``tiles(rows, cols)``,)."""
    tiles_across = tl.maximum(tl.cdiv(cols, BLOCK_C), 1)  # 1: an empty matrix has one program, which records 0
    tile = tl.program_id(0)
    r = (tile // tiles_across) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (tile % tiles_across) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    # A tensor may have more than 2**31 elements: offsets are int64 before they are multiplied.
    wide_r, wide_c = r.to(tl.int64), c.to(tl.int64)

    offsets = wide_r[:, None] * row_stride + wide_c[None, :] * col_stride
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    record_amax(amax_ptr, magnitude_bits(x))

    quant_scale = tl.load(quant_scale_ptr)
    q = (saturated(x, quant_scale, LARGEST) + 0.0 * x).to(q_ptr.dtype.element_ty)
    # Through an integer view: Triton may miscompile transposed FP8 stores (triton#11111, seen as rare NaNs). It can go
    # when that issue is closed in every Triton we allow.
    codes = q.to(tl.uint8, bitcast=True)
    q_bytes = q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    q_t_bytes = q_t_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    tl.store(q_bytes + wide_r[:, None] * cols + c[None, :], codes, mask=inside)
    inside_t = (c < cols)[:, None] & (r < rows)[None, :]
    tl.store(q_t_bytes + wide_c[:, None] * rows + r[None, :], tl.trans(codes), mask=inside_t)


def tiles(rows: int, cols: int, block_r: int = BLOCK_R, block_c: int = BLOCK_C) -> int:
    """Programs to launch; at least one, so that an empty matrix records an amax of 0."""
    return max(1, triton.cdiv(rows, block_r) * triton.cdiv(cols, block_c))


def quantize_transpose(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, amax: Tensor) -> tuple[Tensor, Tensor]:
    """q and q_t; amax (one fp32) is raised in place."""
    rows, cols = x.shape
    q = torch.empty(rows, cols, dtype=dtype, device=x.device)
    q_t = torch.empty(cols, rows, dtype=dtype, device=x.device)
    quantize_transpose_kernel[(tiles(rows, cols),)](
        x,
        quant_scale,
        q,
        q_t,
        amax,
        rows,
        cols,
        *x.stride(),
        LARGEST=format_of(dtype).max,
        BLOCK_R=BLOCK_R,
        BLOCK_C=BLOCK_C,
        num_warps=NUM_WARPS,
    )
    return q, q_t


def reference(x: Tensor, quant_scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, q_t and max |x| in plain PyTorch."""
    q = cast_delayed(x, quant_scale, dtype)
    return q, q.view(torch.uint8).t().contiguous().view(dtype), largest_magnitude(x)
