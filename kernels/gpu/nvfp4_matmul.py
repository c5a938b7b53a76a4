"""Multiply by an NVFP4 weight that is decoded in registers, for GPUs without FP4 tensor cores, and for exact inputs.

    y[m, n] = (sum_k x[m, k] * e2m1[n, k] * block_scale[n, k // 16]) * global_scale + bias[n]

x: [M, K] bf16/fp16/fp32, rows contiguous; codes: uint8 [N, K'/2]; block_scales: e4m3 [N, K'/16]; K' is K in whole
blocks -> y: [M, N] in x's dtype. A value times its block scale has six significant bits: exact in bf16 and fp16: the
tensor cores multiply exactly what the weight is; sums and the two last operations are in FP32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 128
TWICE = 0xC8643210  # nibble c: twice the E2M1 value of code c


@triton.jit
def decoded(codes, scales, TWICE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """codes: uint8 [ROWS, COLUMNS / 2], scales: fp32 [ROWS, COLUMNS / 16] -> fp32 [ROWS, COLUMNS]."""
    wide = codes.to(tl.uint32)
    nibbles = tl.reshape(tl.join(wide & 15, wide >> 4), [ROWS, COLUMNS])
    table = tl.full([ROWS, COLUMNS], TWICE, tl.uint32)
    magnitude = ((table >> ((nibbles & 7) * 4)) & 15).to(tl.float32) * 0.5
    values = tl.where(nibbles >= 8, -magnitude, magnitude)
    blocks = tl.reshape(values, [ROWS, COLUMNS // 16, 16]) * scales[:, :, None]
    return tl.reshape(blocks, [ROWS, COLUMNS])


@triton.jit
def nvfp4_matmul_kernel(
    x_ptr,
    codes_ptr,
    block_scales_ptr,
    global_scale_ptr,
    bias_ptr,
    y_ptr,
    rows,  # M
    cols,  # N
    inner,  # K
    per_row,  # K' / 16
    row_stride,  # of x
    HAS_BIAS: tl.constexpr,
    TWICE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A program makes [BLOCK_M, BLOCK_N] of y."""
    # Offsets are int64 before they are multiplied: a tensor may have more than 2**31 elements.
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (m < rows)[:, None] & (k < inner)[None, :]
        x = tl.load(x_ptr + m[:, None] * row_stride + k[None, :], mask=inside, other=0.0)
        byte = start // 2 + tl.arange(0, BLOCK_K // 2)
        inside = (n < cols)[:, None] & (byte < per_row * 8)[None, :]
        at = n[:, None] * (per_row * 8) + byte[None, :]
        codes = tl.load(codes_ptr + at, mask=inside, other=0)
        block = start // 16 + tl.arange(0, BLOCK_K // 16)
        inside = (n < cols)[:, None] & (block < per_row)[None, :]
        scales = tl.load(block_scales_ptr + n[:, None] * per_row + block[None, :], mask=inside, other=0.0)
        w = decoded(codes, scales.to(tl.float32), TWICE, BLOCK_N, BLOCK_K).to(x.dtype)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    y = total * tl.load(global_scale_ptr)
    if HAS_BIAS:
        y += tl.load(bias_ptr + n, mask=n < cols, other=0.0).to(tl.float32)[None, :]
    inside = (m < rows)[:, None] & (n < cols)[None, :]
    tl.store(y_ptr + m[:, None] * cols + n[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


def tile(rows: int) -> tuple[int, int]:
    """Rows and columns of y that a program makes: tensor cores want 16 rows, more are worth it where there are more."""
    height = min(64, max(16, triton.next_power_of_2(rows)))
    return height, 32 if height == 16 else 64  # 64 by 16 spills registers on sm_100


def warps(height: int) -> int:
    """Warps of a program. With four, a tile of 64 by 64 spills registers on sm_89 and sm_120 since Triton 3.8; with
    eight it takes 170 and 190 of them."""
    return 8 if height == 64 else 4


def nvfp4_matmul(
    x: Tensor, codes: Tensor, block_scales: Tensor, global_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """y: [M, N]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, inner), cols = x.shape, codes.shape[0]
    y = torch.empty(rows, cols, dtype=x.dtype, device=x.device)
    if y.numel():
        height, width = tile(rows)
        nvfp4_matmul_kernel[(triton.cdiv(rows, height), triton.cdiv(cols, width))](
            x,
            codes,
            block_scales,
            global_scale,
            bias if bias is not None else global_scale,
            y,
            rows,
            cols,
            inner,
            block_scales.shape[1],
            x.stride(0),
            HAS_BIAS=bias is not None,
            TWICE=TWICE,
            BLOCK_M=height,
            BLOCK_N=width,
            BLOCK_K=BLOCK_K,
            num_warps=warps(height),
        )
    return y


def reference(
    x: Tensor, codes: Tensor, block_scales: Tensor, global_scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """The same in plain PyTorch, in FP64 and not rounded to x's dtype."""
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64, device=x.device)
    values = torch.cat([table, -table])[nibbles].unflatten(1, (-1, 16))
    w = (values * block_scales.double().unsqueeze(-1)).flatten(1)[:, : x.shape[1]] * global_scale.double()
    y = x.double() @ w.t()
    return y if bias is None else y + bias.double()
