"""Weights in FP8: E4M3, one scale per row.

    scale = amax(row) / 448, 1 for a row of zeros;   q = e4m3(w / scale);   y = (x q^T) * scale + bias
    the gradient of x, of y's:                                             (grad * scale) q

codes: e4m3 [N, K]; scales: fp32 [N]. The operations are those of ``kernels/nvfp4/ops.py``, for this format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .define_op import define
from .formats import E4M3
from .scaled_codes import ScaledCodes, define_dequantize, scale_of


class FP8Weight(ScaledCodes):
    """An [N, K] matrix in FP8; what ``NVFP4Weight`` is to NVFP4."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(self.codes, self.scales, dtype)


def quantize(w: Tensor, name: str = "weight") -> FP8Weight:
    """Codes and scales of an [N, K] matrix."""
    wide = w.detach().to(torch.float32)
    amax = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(wide.shape[0])
    scales = scale_of(amax, name)
    return FP8Weight((wide / scales[:, None]).clamp_(-E4M3.max, E4M3.max).to(E4M3.dtype), scales)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return (codes.to(torch.float32) * scales[:, None]).to(dtype)


def product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """FP8 values are exact in the dtype of x: only the sum rounds, and the scale multiplies what is summed."""
    y = (x @ codes.to(x.dtype).t()).to(torch.float32) * scales
    return (y if bias is None else y + bias).to(x.dtype)


def gradient(grad: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The gradient of x; scales vary along the sum and multiply grad, rounded to its dtype."""
    return (grad * scales).to(grad.dtype) @ codes.to(grad.dtype)


dequantize_op = define_dequantize("fp8_dequantize", dequantize)
mm_op = define(
    "fp8_mm(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor",
    product,
    lambda x, codes, scales, bias: x.new_empty((x.shape[0], codes.shape[0])),
    cpu="fp8_compile.kernels.cpu.fp8_weight:product",
)
mm_grad_op = define(
    "fp8_mm_grad(Tensor grad, Tensor codes, Tensor scales) -> Tensor",
    gradient,
    lambda grad, codes, scales: grad.new_empty((grad.shape[0], codes.shape[1])),
    cpu="fp8_compile.kernels.cpu.fp8_weight:gradient",
    cuda="fp8_compile.kernels.gpu.fp8_weight_grad:gradient",
)
