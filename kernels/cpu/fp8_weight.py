"""Products with FP8 weights in C++ (``fp8_weight.cpp``): the ``fp8_mm`` of ``kernels/fp8_weight.py`` on a CPU."""

from __future__ import annotations

from torch import Tensor

from fp8_compile.kernels import fp8_weight
from fp8_compile.kernels.formats import BY_DTYPE
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, check


def product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] fp32, bf16 or fp16, codes e4m3 [N, K], scales fp32 [N] -> [M, N] in x's dtype."""
    check("fp8_mm", "x", x, FLOATS, (ANY, ANY))
    check("fp8_mm", "codes", codes, BY_DTYPE, (ANY, x.shape[1]))
    check("fp8_mm", "scales", scales, FP32, codes.shape[:1])
    if bias is not None:
        check("fp8_mm", "bias", bias, FLOATS, codes.shape[:1])
    return fp8_weight.product(x, codes, scales, bias)


def gradient(grad: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """grad [M, N], codes e4m3 [N, K], scales fp32 [N] -> [M, K] in grad's dtype."""
    check("fp8_mm_grad", "grad", grad, FLOATS, (ANY, ANY))
    check("fp8_mm_grad", "codes", codes, BY_DTYPE, (grad.shape[1], ANY))
    check("fp8_mm_grad", "scales", scales, FP32, codes.shape[:1])
    return fp8_weight.gradient(grad, codes, scales)
