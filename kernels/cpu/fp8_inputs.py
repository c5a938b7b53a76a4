"""Inputs of FP8 products in C++ (``fp8_cast.cpp``): the ``quantize_inputs`` of ``kernels/fp8_inputs.py`` on a CPU."""

from __future__ import annotations

from torch import Tensor

from fp8_compile.kernels import fp8_inputs as reference
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, ONE, check


def quantize_inputs(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [M, K] fp32, bf16 or fp16 -> codes e4m3 [M, K], dequant_scale fp32 [1, 1] or [M, 1]; one read of a row."""
    check("quantize_inputs", "x", x, FLOATS, (ANY, ANY))
    if scale is not None:
        check("quantize_inputs", "scale", scale, FP32, *ONE)
    return reference.quantize_inputs(x, scale)
