"""Which GPU kernel multiplies by an NVFP4 weight.

activations=None, "int8"      x as it is, or rounded first: weight-only kernel           nvfp4_matmul.py
activations="nvfp4"           sm_100 and newer: FP4 by FP4 on the tensor cores, scales swizzled, the two global scales
                              multiplied afterwards; elsewhere, and where N is not a multiple of 16 or K not one of 32,
                              x is rounded to NVFP4 and the weight-only kernel runs
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels.nvfp4 import ops
from fp8_compile.kernels.nvfp4.weight import block_size_of
from fp8_compile.kernels.operands import check_value

from .nvfp4_grad import nvfp4_grad
from .nvfp4_matmul import nvfp4_matmul
from .nvfp4_pack import nvfp4_pack

MULTIPLE = 16  # of rows and of bytes in a row, which ``_scaled_mm`` wants


def product(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    activations: str | None,
    layout: str = ops.STANDARD,
) -> Tensor:
    """x w^T + bias, [M, N] in x's dtype."""
    check_value("nvfp4_mm", "layout", layout, ops.LAYOUTS)
    fits = all(size % MULTIPLE == 0 for size in codes.shape) and x.dtype in (torch.bfloat16, torch.float16)
    if layout == ops.SWIZZLED and activations == "nvfp4" and fits:
        return fp4_by_fp4(x, codes, block_scales, global_scale, bias)
    codes, block_scales = ops.to_standard(codes, block_scales, layout)
    if block_size_of(codes, block_scales) != 16:
        return ops.reference(x, codes, block_scales, global_scale, bias, activations)
    if activations is not None:
        x = ops.round_activations(x, activations)
    return nvfp4_matmul(x, codes, block_scales, global_scale, bias)


def gradient(
    grad: Tensor, codes: Tensor, block_scales: Tensor, global_scale: Tensor, columns: int, layout: str
) -> Tensor:
    """grad w, [M, columns] in grad's dtype: the gradient of x, by the weight-only kernel."""
    check_value("nvfp4_mm_grad", "layout", layout, ops.LAYOUTS)
    codes, block_scales = ops.to_standard(codes, block_scales, layout)
    if block_size_of(codes, block_scales) != 16 or grad.dtype == torch.float64:
        return ops.reference_grad(grad, codes, block_scales, global_scale, columns, ops.STANDARD)
    return nvfp4_grad(grad, codes, block_scales, global_scale, columns)


def fp4_by_fp4(
    x: Tensor, codes: Tensor, swizzled: Tensor, global_scale: Tensor, bias: Tensor | None, quantize=nvfp4_pack
) -> Tensor:
    """Both operands in FP4 with swizzled block scales: cuBLAS on sm_100."""
    x = torch.nn.functional.pad(x, (0, 2 * codes.shape[1] - x.shape[1])).contiguous()
    x_scale = ops.activation_scale(x)
    x_codes, x_scales = quantize(x, x_scale, swizzled=True)
    fp4 = torch.float4_e2m1fn_x2
    y = torch._scaled_mm(
        x_codes.view(fp4), codes.view(fp4).t(), x_scales.flatten(), swizzled.flatten(), out_dtype=torch.bfloat16
    )
    y = y.to(torch.float32) * (x_scale * global_scale)
    return (y if bias is None else y + bias).to(x.dtype)
