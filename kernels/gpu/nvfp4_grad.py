"""Multiply a gradient by an NVFP4 weight that is decoded in registers: the gradient of a packed layer's inputs.

    out[m, k] = (sum_n grad[m, n] * e2m1[n, k] * block_scale[n, k // 16]) * global_scale

grad: [M, N] bf16/fp16/fp32, rows contiguous; codes: uint8 [N, K'/2]; block_scales: e4m3 [N, K'/16]; K' is K in whole
blocks -> out: [M, K] in grad's dtype. As in ``nvfp4_matmul.py`` the tensor cores multiply exactly what the weight is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .nvfp4_matmul import TWICE, decoded

BLOCK_N = 64  # of the sum
WIDTH = 64  # columns of out that a program makes


@triton.jit
def nvfp4_grad_kernel(
    grad_ptr,
    codes_ptr,
    block_scales_ptr,
    global_scale_ptr,
    out_ptr,
    rows,  # M
    inner,  # N
    cols,  # K
    per_row,  # K' / 16
    row_stride,  # of grad
    TWICE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program makes [BLOCK_M, BLOCK_K] of out."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1).to(tl.int64) * BLOCK_K
    byte = first // 2 + tl.arange(0, BLOCK_K // 2)
    block = first // 16 + tl.arange(0, BLOCK_K // 16)
    total = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, inner, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (m < rows)[:, None] & (n < inner)[None, :]
        grad = tl.load(grad_ptr + m[:, None] * row_stride + n[None, :], mask=inside, other=0.0)
        inside = (n < inner)[:, None] & (byte < per_row * 8)[None, :]
        codes = tl.load(codes_ptr + n[:, None] * (per_row * 8) + byte[None, :], mask=inside, other=0)
        inside = (n < inner)[:, None] & (block < per_row)[None, :]
        scales = tl.load(block_scales_ptr + n[:, None] * per_row + block[None, :], mask=inside, other=0.0)
        w = decoded(codes, scales.to(tl.float32), TWICE, BLOCK_N, BLOCK_K).to(grad.dtype)
        total = tl.dot(grad, w, total, input_precision="ieee")
    k = first + tl.arange(0, BLOCK_K)
    inside = (m < rows)[:, None] & (k < cols)[None, :]
    out = (total * tl.load(global_scale_ptr)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + m[:, None] * cols + k[None, :], out, mask=inside)


def tile(rows: int) -> int:
    """Rows of out that a program makes: tensor cores want 16, more are worth it where there are more."""
    return min(64, max(16, triton.next_power_of_2(rows)))


def warps(height: int) -> int:
    """Of a program. With eight, Triton 3.8 spills registers of FP8's kernel with 16 rows on gfx942."""
    return 4 if height <= 16 else 8


def nvfp4_grad(grad: Tensor, codes: Tensor, block_scales: Tensor, global_scale: Tensor, columns: int) -> Tensor:
    """out: [M, columns]."""
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    rows, inner = grad.shape
    out = torch.empty(rows, columns, dtype=grad.dtype, device=grad.device)
    if out.numel():
        height = tile(rows)
        nvfp4_grad_kernel[(triton.cdiv(rows, height), triton.cdiv(columns, WIDTH))](
            grad,
            codes,
            block_scales,
            global_scale,
            out,
            rows,
            inner,
            columns,
            block_scales.shape[1],
            grad.stride(0),
            TWICE=TWICE,
            BLOCK_M=height,
            BLOCK_N=BLOCK_N,
            BLOCK_K=WIDTH,
            num_warps=warps(height),
        )
    return out
