"""Inputs of products with FP8 weights, in FP8 too: E4M3, by a scale that is known or by one scale per row.

    known:    q = e4m3(clamp(x * (1 / scale), -448, 448) + 0 * x)        scale: amax of a calibration / 448
    None:     q, scale[m] = quantize(x) row by row                       kernels/quantize.py

x: [M, K] fp32/bf16/fp16 -> q: e4m3 [M, K], dequant_scale: fp32 [1, 1] or [M, 1].

Inf and NaN do not vanish: by a known scale they are NaN among the codes (``0 * x``), otherwise in the row's scale.
Rows that are scaled by themselves do not depend on what else is in the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .define_op import define
from .delayed_scaling import cast_delayed
from .formats import E4M3
from .quantize import WHOLE, dequantize, quantize

ACTIVATIONS = (None, "fp8")  # of a layer with FP8 weights
ROWS = (1, WHOLE)


def quantize_inputs(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """The formula above in plain PyTorch."""
    if scale is None:
        return quantize(x.contiguous(), E4M3.dtype, ROWS)
    return cast_delayed(x, scale.reciprocal(), E4M3.dtype), scale.reshape(1, 1).clone()


def round_inputs(x: Tensor, scale: Tensor | None) -> Tensor:
    """x as the product will see it, [M, K] in its own dtype."""
    return dequantize(*quantize_inputs(x, scale), ROWS).to(x.dtype)


def _fake(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = x.shape[0] if scale is None else 1
    return x.new_empty(x.shape, dtype=E4M3.dtype), x.new_empty((rows, 1), dtype=torch.float32)


# quantize_inputs stands for one quantize in the graph, which q, k and v share. In eager mode, and until products are
# rewritten, it is round_inputs.
quantize_inputs_op = define(
    "quantize_inputs(Tensor x, Tensor? scale) -> (Tensor q, Tensor dequant_scale)",
    quantize_inputs,
    _fake,
    cpu="fp8_compile.kernels.cpu.fp8_inputs:quantize_inputs",
)
round_inputs_op = define(
    "round_inputs(Tensor x, Tensor? scale) -> Tensor",
    round_inputs,
    lambda x, scale: torch.empty_like(x, memory_format=torch.contiguous_format),
    gradient=lambda ctx, grad: (grad, None),  # as if the rounding were not there
)
