"""Products of FP8 whose operands are quantized on the way in, as one operation of a graph.

    quantize_mm           y = scaled_mm(quantize(x), permute(quantize(weight)), ...) + bias
    quantize_delayed_mm   the same by a quantize scale of x that was known before x was, and the amax of x

x: [M, K] fp32/bf16/fp16, weight: [N, K] the same, or fp8 with its weight_scale [1, 1] or [1, N] -> y: [M, N] like x.
Formulas: ``kernels/quantize.py``, ``kernels/delayed_scaling.py``, ``kernels/scaled_mm.py``.

``rows``: one scale per row of x, and of a weight that is not FP8 yet; otherwise one per tensor. ``e5m2``: their format.
``scale``: that of x is known (``kernels/fp8_inputs.py``). On a few rows a call costs as much as the work in it: here it
is one instead of three or five. A dtype for an argument costs nearly a microsecond, so there is none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.formats import E4M3, E5M2
from fp8_compile.kernels.fp8_inputs import quantize_inputs
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, ONE, check
from fp8_compile.kernels.quantize import WHOLE, quantize
from fp8_compile.kernels.scaled_mm import scaled_mm

from .arguments import DTYPES, FORMATS
from .quantize import quantize_delayed

FORMAT = {False: E4M3.dtype, True: E5M2.dtype}  # by e5m2


def quantize_mm(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    e5m2: bool,
    rows: bool,
) -> Tensor:
    """The formula above in plain PyTorch."""
    block = (1, WHOLE) if rows else (WHOLE, WHOLE)
    left = quantize(x.contiguous(), FORMAT[e5m2], block) if scale is None else quantize_inputs(x, scale)
    return _times_weight(*left, weight, weight_scale, bias, block, x.dtype)


def quantize_delayed_mm(
    x: Tensor,
    quant_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    e5m2: bool,
) -> tuple[Tensor, Tensor]:
    """The formula above in plain PyTorch: y and the amax [1, 1]."""
    codes, _, dequant_scale, amax = quantize_delayed(x, quant_scale, FORMAT[e5m2], True)
    return _times_weight(codes, dequant_scale, weight, weight_scale, bias, (WHOLE, WHOLE), x.dtype), amax


def _times_weight(
    codes: Tensor,
    dequant_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    block: tuple[int, int],
    out_dtype: torch.dtype,
) -> Tensor:
    if weight_scale is None:
        weight, by_row = quantize(weight.contiguous(), codes.dtype, block)
        weight_scale = by_row.t()
    return scaled_mm(codes, weight.t(), dequant_scale, weight_scale, bias, out_dtype)


def _checked(
    x: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    e5m2: bool,
    rows: bool,
) -> Tensor:
    op = "quantize_mm"
    check(op, "x", x, DTYPES, (ANY, ANY))
    if scale is not None:
        check(op, "scale", scale, FP32, *ONE)
    if scale is not None and e5m2:
        raise RuntimeError(f"fp8_compile::{op}: e5m2: expected False where scale is known, got True")
    _check_weight(op, x, weight, weight_scale, bias)
    return quantize_mm(x, scale, weight, weight_scale, bias, e5m2, rows)


def _checked_delayed(
    x: Tensor,
    quant_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    e5m2: bool,
) -> tuple[Tensor, Tensor]:
    op = "quantize_delayed_mm"
    check(op, "x", x, DTYPES, (ANY, ANY))
    check(op, "quant_scale", quant_scale, FP32, *ONE)
    _check_weight(op, x, weight, weight_scale, bias)
    return quantize_delayed_mm(x, quant_scale, weight, weight_scale, bias, e5m2)


def _check_weight(op: str, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
    check(op, "weight", weight, DTYPES if scale is None else FORMATS, (ANY, x.shape[1]))
    n = weight.shape[0]
    if scale is not None:
        check(op, "weight_scale", scale, FP32, (1, 1), (1, n))
    if bias is not None:
        check(op, "bias", bias, FLOATS, (n,))


quantize_mm_op = define(
    "quantize_mm(Tensor x, Tensor? scale, Tensor weight, Tensor? weight_scale, Tensor? bias, bool e5m2, bool rows)"
    " -> Tensor",
    quantize_mm,
    lambda x, scale, weight, *options: x.new_empty((x.shape[0], weight.shape[0])),
    cpu=_checked,
)
quantize_delayed_mm_op = define(
    "quantize_delayed_mm(Tensor x, Tensor quant_scale, Tensor weight, Tensor? weight_scale, Tensor? bias, bool e5m2)"
    " -> (Tensor y, Tensor amax)",
    quantize_delayed_mm,
    lambda x, quant_scale, weight, *options: (
        x.new_empty((x.shape[0], weight.shape[0])),
        x.new_empty((1, 1), dtype=torch.float32),
    ),
    cpu=_checked_delayed,
)
