"""Inputs of products with NVFP4 weights, in NVFP4 as training rounds them, and servers with a static global scale.

    rows = e2m1 * e4m3_block_scale          kernels/nvfp4_training.py, blocks of 16 along K;   x = rows / enc

x: [M, K] fp32/bf16/fp16, enc: fp32 [1, 1], 2688 / amax, of this tensor or of earlier ones -> rows [M, K] in the dtype
of x, in which they are exact. ``1 / enc`` belongs to the product: whoever multiplies gives it to the weight's global
scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.nvfp4_training import dequantize_nvfp4, quantize_nvfp4_op, round_nvfp4

ROWS = (1, 16)


def round_inputs(x: Tensor, enc: Tensor, four_over_six: bool) -> Tensor:
    """The formula above."""
    codes, scales = quantize_nvfp4_op(x.contiguous(), enc, ROWS, False, False, None, 0, four_over_six)
    return dequantize_nvfp4(codes, scales)[:, : x.shape[1]].to(x.dtype).contiguous()


def written_out(x: Tensor, enc: Tensor, four_over_six: bool) -> Tensor:
    """The same as operations that a compiler fuses."""
    return round_nvfp4(x, enc, ROWS, four_over_six).to(x.dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    """As if rows were ``x * enc``."""
    (enc,) = ctx.saved_tensors
    return (grad * enc).to(grad.dtype), None, None


round_inputs_op = define(
    "nvfp4_round_inputs(Tensor x, Tensor enc, bool four_over_six) -> Tensor",
    round_inputs,
    lambda x, enc, four_over_six: torch.empty_like(x, memory_format=torch.contiguous_format),
    gradient=_gradient,
    keep=_keep,
)
