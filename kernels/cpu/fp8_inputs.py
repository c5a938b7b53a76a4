"""Inputs of FP8 products in C++ (``fp8_cast.cpp``): the ``quantize_inputs`` of ``kernels/fp8_inputs.py`` on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels import fp8_inputs as reference
from fp8_compile.kernels.formats import E4M3
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, ONE, check

from .arguments import CAST_LEAST_PARALLEL, DTYPES, threads_for
from .library import library


def quantize_inputs(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [M, K] fp32, bf16 or fp16 -> codes e4m3 [M, K], dequant_scale fp32 [1, 1] or [M, 1]; one read of a row."""
    check("quantize_inputs", "x", x, FLOATS, (ANY, ANY))
    if scale is not None:
        check("quantize_inputs", "scale", scale, FP32, *ONE)
    kernels = library()
    if kernels is None or x.dtype not in DTYPES:
        return reference.quantize_inputs(x, scale)
    rows, cols = x.shape
    if x.stride(1) != 1 and cols > 1:
        x = x.contiguous()
    codes = x.new_empty((rows, cols), dtype=E4M3.dtype)
    dequant_scale = x.new_empty((rows if scale is None else 1, 1), dtype=torch.float32)
    kernels.fp8_inputs(
        *(x.data_ptr(), DTYPES[x.dtype], rows, cols, x.stride(0), None if scale is None else scale.data_ptr()),
        *(codes.data_ptr(), dequant_scale.data_ptr()),
        threads_for(x.numel(), CAST_LEAST_PARALLEL),
    )
    return codes, dequant_scale
