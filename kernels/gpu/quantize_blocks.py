"""Quantize a matrix with a scale a block of 128, in both layouts, with one read.

    amax          = max |x| over the block, floored at 1e-12
    quant_scale   = F / amax                                F: the largest value of the format
    dequant_scale = 1 / quant_scale + 0 * amax              NaN where the block holds an Inf or NaN
    q             = fp8(clamp(x * quant_scale, -F, F))

    1 x 128 (inputs, gradients):  q with a block along each row of x, q_t with a block along each row of x^T
    128 x 128 (weights):          q and q_t = transpose(q) share their scales

x: [R, C] fp32/bf16/fp16, any strides -> q: [R, C] fp8; q_t: [C, R] fp8, both row-major; dequant scales fp32:
1 x 128 gives [R, ceil(C/128)] and [C, ceil(R/128)]; 128 x 128 gives [ceil(R/128), ceil(C/128)] once.
4 bytes an element in bf16: 2 read, 1 + 1 written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import format_of
from ..quantize import quantize
from .tile import magnitude_bits, saturated, scales_of

SIZE = 128  # of a block
# 32 elements a thread on NVIDIA. With 8 warps it takes 190 registers instead of 121, so half as many warps run at once.
NUM_WARPS = 16


@triton.jit
def quantize_blocks_kernel(
    x_ptr,
    q_ptr,
    q_t_ptr,
    dequant_ptr,
    dequant_t_ptr,  # not used where SQUARE
    rows,
    cols,
    row_stride,
    col_stride,
    LARGEST: tl.constexpr,
    SQUARE: tl.constexpr,  # one scale a tile, instead of one a row and one a column of it
    SIZE: tl.constexpr,
):
    """One SIZE x SIZE tile a program, tiles along a row first."""
    tiles_across, tiles_down = tl.cdiv(cols, SIZE), tl.cdiv(rows, SIZE)
    down, across = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    r = down * SIZE + tl.arange(0, SIZE)
    c = across * SIZE + tl.arange(0, SIZE)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    # A tensor may have more than 2**31 elements: offsets are int64 before they are multiplied.
    wide_r, wide_c = r.to(tl.int64), c.to(tl.int64)
    x = tl.load(x_ptr + wide_r[:, None] * row_stride + wide_c[None, :] * col_stride, mask=inside, other=0.0)
    x = x.to(tl.float32)
    bits = magnitude_bits(x)
    row_bits = tl.max(bits, axis=1)

    # FP8 goes out through an integer view: Triton may miscompile transposed FP8 stores (triton#11111).
    q_bytes = q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    q_t_bytes = q_t_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    inside_t = (c < cols)[:, None] & (r < rows)[None, :]
    if SQUARE:
        quant_scale, dequant_scale = scales_of(tl.max(row_bits, axis=0), LARGEST)
        tl.store(dequant_ptr + down.to(tl.int64) * tiles_across + across, dequant_scale)
        codes = saturated(x, quant_scale, LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
        codes_t = codes
    else:
        quant_scale, dequant_scale = scales_of(row_bits, LARGEST)
        tl.store(dequant_ptr + wide_r * tiles_across + across, dequant_scale, mask=r < rows)
        codes = saturated(x, quant_scale[:, None], LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
        quant_scale, dequant_scale = scales_of(tl.max(bits, axis=0), LARGEST)
        tl.store(dequant_t_ptr + wide_c * tiles_down + down, dequant_scale, mask=c < cols)
        codes_t = saturated(x, quant_scale[None, :], LARGEST).to(q_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
    tl.store(q_bytes + wide_r[:, None] * cols + c[None, :], codes, mask=inside)
    tl.store(q_t_bytes + wide_c[:, None] * rows + r[None, :], tl.trans(codes_t), mask=inside_t)


def quantize_blocks(x: Tensor, dtype: torch.dtype, square: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, its dequant scales, q_t, its dequant scales (where ``square``, the transpose of the others)."""
    rows, cols = x.shape
    down, across = triton.cdiv(rows, SIZE), triton.cdiv(cols, SIZE)
    q = torch.empty(rows, cols, dtype=dtype, device=x.device)
    q_t = torch.empty(cols, rows, dtype=dtype, device=x.device)
    dequant = torch.empty(down if square else rows, across, dtype=torch.float32, device=x.device)
    dequant_t = dequant.t() if square else torch.empty(cols, down, dtype=torch.float32, device=x.device)
    if x.numel():
        quantize_blocks_kernel[(down * across,)](
            x,
            q,
            q_t,
            dequant,
            dequant_t,
            rows,
            cols,
            *x.stride(),
            LARGEST=format_of(dtype).max,
            SQUARE=square,
            SIZE=SIZE,
            num_warps=NUM_WARPS,
        )
    return q, dequant, q_t, dequant_t


def reference(x: Tensor, dtype: torch.dtype, square: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in plain PyTorch: the matrix and its transpose, quantized on their own."""
    block = (SIZE, SIZE) if square else (1, SIZE)
    return *quantize(x, dtype, block), *quantize(x.t(), dtype, block)
