"""Multiply a gradient by an FP8 weight that is decoded in registers: the gradient of a packed layer's inputs.

    out[m, k] = sum_n (grad[m, n] * scale[n]) * e4m3[n, k]

grad: [M, N] bf16/fp16/fp32, rows contiguous; codes: e4m3 [N, K]; scales: fp32 [N] -> out: [M, K] in grad's dtype. An
E4M3 value is exact in bf16 and fp16. Scales vary along the sum: they multiply grad, which is then rounded to its dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_compile.kernels import fp8_weight

from .nvfp4_grad import BLOCK_N, WIDTH, tile, warps


@triton.jit
def fp8_weight_grad_kernel(
    grad_ptr,
    codes_ptr,
    scales_ptr,
    out_ptr,
    rows,  # M
    inner,  # N
    cols,  # K
    row_stride,  # of grad
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program makes [BLOCK_M, BLOCK_K] of out."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(0, inner, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N).to(tl.int64)
        inside = (m < rows)[:, None] & (n < inner)[None, :]
        grad = tl.load(grad_ptr + m[:, None] * row_stride + n[None, :], mask=inside, other=0.0)
        scales = tl.load(scales_ptr + n, mask=n < inner, other=0.0)
        scaled = (grad.to(tl.float32) * scales[None, :]).to(grad.dtype)
        inside = (n < inner)[:, None] & (k < cols)[None, :]
        codes = tl.load(codes_ptr + n[:, None] * cols + k[None, :], mask=inside, other=0.0)
        total = tl.dot(scaled, codes.to(tl.float32).to(grad.dtype), total, input_precision="ieee")
    inside = (m < rows)[:, None] & (k < cols)[None, :]
    tl.store(out_ptr + m[:, None] * cols + k[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def gradient(grad: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """``fp8_mm_grad`` on a GPU: [M, K] in grad's dtype."""
    if grad.dtype == torch.float64 or codes.dtype != torch.float8_e4m3fn:
        return fp8_weight.gradient(grad, codes, scales)
    return fp8_weight_grad(grad, codes, scales)


def fp8_weight_grad(grad: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """out: [M, K]."""
    grad, codes = grad if grad.stride(1) == 1 else grad.contiguous(), codes.contiguous()
    (rows, inner), cols = grad.shape, codes.shape[1]
    out = torch.empty(rows, cols, dtype=grad.dtype, device=grad.device)
    if out.numel():
        height = tile(rows)
        fp8_weight_grad_kernel[(triton.cdiv(rows, height), triton.cdiv(cols, WIDTH))](
            grad,
            codes,
            scales.contiguous(),
            out,
            rows,
            inner,
            cols,
            grad.stride(0),
            BLOCK_M=height,
            BLOCK_N=BLOCK_N,
            BLOCK_K=WIDTH,
            num_warps=warps(height),
        )
    return out
