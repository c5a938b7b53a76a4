"""An operand of a forward gemm as high precision has it: what its codes stand for, for backward gemms that are not FP8.

    FP8       x = dtype(q * dequant_scale)                                       kernels/quantize.py has the blocks
    MXFP8     x = dtype(q * 2**(scale - 127))                                    kernels/mxfp8.py
    NVFP4     x = dtype(code * s * dequant)                                      kernels/nvfp4_training.py

Products are FP32, in the order in which they are written, and rounded once, to ``dtype``. MXFP8 rounds nothing: a power
of two times an E4M3 value is exact in bf16.

q: [R, C] fp8, dequant_scale: [ceil(R/r), ceil(C/c)] fp32 or uint8; codes: [R, C'/2] uint8, scales [R, C'/16] or
[ceil(R/16), C'/16] e4m3, dequant [1, 1] fp32 -> x: [R, C], of which NVFP4 is told C.

Each operation stands for its formula in the joint graph, so that a pass can tell where codes are read; it is replaced
by the formula before the graph is split (``passes/joint/lower_quantizes.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .define_op import define
from .mxfp8 import dequantize_mx
from .nvfp4_training import SIZE
from .quantize import Block, dequantize, spread


def dequantize_fp8_operand(q: Tensor, dequant_scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    return dequantize(q, dequant_scale, block).to(dtype)


def dequantize_mx_operand(q: Tensor, scale: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    return dequantize_mx(q, scale, block).to(dtype)


def dequantize_nvfp4_operand(
    codes: Tensor, scales: Tensor, dequant: Tensor, block: Block, cols: int, dtype: torch.dtype
) -> Tensor:
    both = torch.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], 2 * codes.shape[1])
    magnitude = (both & 7).to(torch.float32)  # 0 to 7 stand for 0, 0.5, 1, 1.5, 2, 3, 4, 6
    value = torch.where(magnitude < 4, magnitude * 0.5, torch.where(magnitude < 7, magnitude - 2.0, 6.0))
    value = torch.where(both > 7, -value, value)
    shape = torch.Size((codes.shape[0], scales.shape[1] * SIZE))
    return (value * spread(scales.to(torch.float32), shape, block) * dequant)[:, :cols].to(dtype)


dequantize_fp8_operand_op = define(
    "dequantize_fp8_operand(Tensor q, Tensor dequant_scale, int[2] block, ScalarType dtype) -> Tensor",
    dequantize_fp8_operand,
    lambda q, dequant_scale, block, dtype: q.new_empty(q.shape, dtype=dtype),
)
dequantize_mx_operand_op = define(
    "dequantize_mx_operand(Tensor q, Tensor scale, int[2] block, ScalarType dtype) -> Tensor",
    dequantize_mx_operand,
    lambda q, scale, block, dtype: q.new_empty(q.shape, dtype=dtype),
)
dequantize_nvfp4_operand_op = define(
    "dequantize_nvfp4_operand(Tensor codes, Tensor scales, Tensor dequant, int[2] block, SymInt cols,"
    " ScalarType dtype) -> Tensor",
    dequantize_nvfp4_operand,
    lambda codes, scales, dequant, block, cols, dtype: codes.new_empty((codes.shape[0], cols), dtype=dtype),
)
FORMULAS: dict[Any, Callable[..., Tensor]] = {
    dequantize_fp8_operand_op: dequantize_fp8_operand,
    dequantize_mx_operand_op: dequantize_mx_operand,
    dequantize_nvfp4_operand_op: dequantize_nvfp4_operand,
}
