"""Products of FP8 whose operands are quantized on the way in, as one operation of a graph.

    quantize_mm           y = scaled_mm(quantize(x), permute(quantize(weight)), ...) + bias
    quantize_delayed_mm   the same by a quantize scale of x that was known before x was, and the amax of x

x: [M, K] fp32/bf16/fp16, weight: [N, K] the same, or fp8 with its weight_scale [1, 1] or [1, N] -> y: [M, N]. Formulas:
``kernels/quantize.py``, ``kernels/delayed_scaling.py``, ``kernels/scaled_mm.py``.

``rows``: one scale per row of x, and of a weight that is not FP8 yet; otherwise one per tensor. ``scale``: that of x is
known (``kernels/fp8_inputs.py``), and dtype is E4M3. On a few rows a call costs as much as the work in it: here it is
one instead of three or five.
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
from .quantize import quantize_delayed


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
    left = quantize(x.contiguous(), dtype, block) if scale is None else quantize_inputs(x, scale)
    return _times_weight(*left, weight, weight_scale, bias, dtype, block, out_dtype)


def quantize_delayed_mm(
    x: Tensor,
    quant_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The formula above in plain PyTorch: y and the amax [1, 1]."""
    codes, _, dequant_scale, amax = quantize_delayed(x, quant_scale, dtype, True)
    return _times_weight(codes, dequant_scale, weight, weight_scale, bias, dtype, (WHOLE, WHOLE), out_dtype), amax


def _times_weight(
    codes: Tensor,
    dequant_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    block: tuple[int, int],
    out_dtype: torch.dtype,
) -> Tensor:
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
    _check_weight(op, x, weight, weight_scale, bias, out_dtype)
    return quantize_mm(x, scale, weight, weight_scale, bias, dtype, rows, out_dtype)


def _checked_delayed(
    x: Tensor,
    quant_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    op = "quantize_delayed_mm"
    check(op, "x", x, DTYPES, (ANY, ANY))
    check(op, "quant_scale", quant_scale, FP32, *ONE)
    check_value(op, "dtype", dtype, FORMATS)
    _check_weight(op, x, weight, weight_scale, bias, out_dtype)
    return quantize_delayed_mm(x, quant_scale, weight, weight_scale, bias, dtype, out_dtype)


def _check_weight(
    op: str, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, out_dtype: torch.dtype
) -> None:
    check(op, "weight", weight, DTYPES if scale is None else FORMATS, (ANY, x.shape[1]))
    n = weight.shape[0]
    if scale is not None:
        check(op, "weight_scale", scale, FP32, (1, 1), (1, n))
    if bias is not None:
        check(op, "bias", bias, FLOATS, (n,))
    check_value(op, "out_dtype", out_dtype, DTYPES)


quantize_mm_op = define(
    "quantize_mm(Tensor x, Tensor? scale, Tensor weight, Tensor? weight_scale, Tensor? bias, ScalarType dtype,"
    " bool rows, ScalarType out_dtype) -> Tensor",
    quantize_mm,
    lambda x, scale, weight, weight_scale, bias, dtype, rows, out_dtype: x.new_empty(
        (x.shape[0], weight.shape[0]), dtype=out_dtype
    ),
    cpu=_checked,
)
quantize_delayed_mm_op = define(
    "quantize_delayed_mm(Tensor x, Tensor quant_scale, Tensor weight, Tensor? weight_scale, Tensor? bias,"
    " ScalarType dtype, ScalarType out_dtype) -> (Tensor y, Tensor amax)",
    quantize_delayed_mm,
    lambda x, quant_scale, weight, weight_scale, bias, dtype, out_dtype: (
        x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype),
        x.new_empty((1, 1), dtype=torch.float32),
    ),
    cpu=_checked_delayed,
)
