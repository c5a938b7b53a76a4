"""A product of FP8 whose operands are quantized on the way in, as one operation of a graph.

    y = scaled_mm(quantize(x), permute(quantize(weight)), ...) + bias        kernels/quantize.py, kernels/scaled_mm.py

x: [M, K] fp32/bf16/fp16, weight: [N, K] the same, or fp8 with its weight_scale [1, 1] or [1, N] -> y: [M, N].

``rows``: one scale per row of x, and of a weight that is not FP8 yet; otherwise one per tensor. ``scale``: that of x is
known (``kernels/fp8_inputs.py``), and dtype is E4M3. A layer of a few rows takes as long as the calls that it is made
of, so one call is a third of three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.fp8_inputs import quantize_inputs
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, ONE, check, check_value
from fp8_compile.kernels.quantize import WHOLE, quantize
from fp8_compile.kernels.scaled_mm import scaled_mm

from .arguments import DTYPES, FORMATS


def quantize_mm(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """The formula above in plain PyTorch."""
    block = (1, WHOLE) if rows else (WHOLE, WHOLE)
    codes, dequant_scale = quantize(x.contiguous(), dtype, block) if scale is None else quantize_inputs(x, scale)
    if weight_scale is None:
        weight, by_row = quantize(weight.contiguous(), dtype, block)
        weight_scale = by_row.t()
    return scaled_mm(codes, weight.t(), dequant_scale, weight_scale, bias, out_dtype)


def _checked(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    rows: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    op = "quantize_mm"
    check(op, "x", x, DTYPES, (ANY, ANY))
    check_value(op, "dtype", dtype, FORMATS if scale is None else [torch.float8_e4m3fn])
    if scale is not None:
        check(op, "scale", scale, FP32, *ONE)
    check(op, "weight", weight, DTYPES if weight_scale is None else FORMATS, (ANY, x.shape[1]))
    n = weight.shape[0]
    if weight_scale is not None:
        check(op, "weight_scale", weight_scale, FP32, (1, 1), (1, n))
    if bias is not None:
        check(op, "bias", bias, FLOATS, (n,))
    check_value(op, "out_dtype", out_dtype, DTYPES)
    return quantize_mm(x, scale, weight, weight_scale, bias, dtype, rows, out_dtype)


quantize_mm_op = define(
    "quantize_mm(Tensor x, Tensor? scale, Tensor weight, Tensor? weight_scale, Tensor? bias, ScalarType dtype,"
    " bool rows, ScalarType out_dtype) -> Tensor",
    quantize_mm,
    lambda x, scale, weight, weight_scale, bias, dtype, rows, out_dtype: x.new_empty(
        (x.shape[0], weight.shape[0]), dtype=out_dtype
    ),
    cpu=_checked,
)
