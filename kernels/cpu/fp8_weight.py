"""Products with FP8 weights in C++ (``fp8_weight.cpp``): the ``fp8_mm`` of ``kernels/fp8_weight.py`` on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels import fp8_weight
from fp8_compile.kernels.formats import BY_DTYPE, E4M3
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, check

from .arguments import DTYPES, FP8_WEIGHT_LEAST_PARALLEL, threads_for
from .library import library


def product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, K] fp32, bf16 or fp16, codes e4m3 [N, K], scales fp32 [N] -> [M, N] in x's dtype."""
    check("fp8_mm", "x", x, FLOATS, (ANY, ANY))
    check("fp8_mm", "codes", codes, BY_DTYPE, (ANY, x.shape[1]))
    check("fp8_mm", "scales", scales, FP32, codes.shape[:1])
    if bias is not None:
        check("fp8_mm", "bias", bias, FLOATS, codes.shape[:1])
    kernels = library()
    if kernels is None or x.dtype not in DTYPES or codes.dtype != E4M3.dtype:
        return fp8_weight.product(x, codes, scales, bias)
    (m, k), n = x.shape, codes.shape[0]
    if x.stride(1) != 1 and k > 1:
        x = x.contiguous()
    codes, scales = codes.contiguous(), scales.contiguous()
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    y = x.new_empty((m, n))
    kernels.fp8_weight_mm(
        *(x.data_ptr(), m, k, x.stride(0), DTYPES[x.dtype], codes.data_ptr(), scales.data_ptr(), n),
        *(None if bias is None else bias.data_ptr(), y.data_ptr()),
        threads_for(m * n * k, FP8_WEIGHT_LEAST_PARALLEL),
    )
    return y
