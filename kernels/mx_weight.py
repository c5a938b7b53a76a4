"""Weights in MXFP8: E4M3, one power of two per 32 values along K, or per tile of 32 x 32.

    w = code * 2**(scale - 127);   y = round(x) w^T + bias           round: x by blocks of 32 along K, kernels/mxfp8.py

codes: e4m3 [N, K]; scales: uint8 [N, ceil(K / 32)], or [ceil(N / 32), ceil(K / 32)] of tiles. A value of a weight or of
a rounded input is exact in bf16 and FP32: only sums round. A stack of matrices has one more dimension in front.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .mxfp8 import SIZE, dequantize_mx, power_of_e8m0, quantize_mx, quantize_mx_op
from .scaled_codes import (
    ScaledCodes,
    check_finite,
    define_dequantize,
    define_dequantize_rounding,
    define_round_inputs,
)

ACTIVATIONS = (None, "mxfp8")
INPUTS = (1, SIZE)


class MXWeight(ScaledCodes):
    """An [N, K] matrix in MXFP8."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(self.codes, self.scales, dtype)


def quantize(w: Tensor, name: str = "weight", *, tiles: bool = False) -> MXWeight:
    """Codes and scales of an [N, K] matrix; ``tiles``: as training has them, so that both gemms read the same."""
    check_finite(w, name)
    return MXWeight(*quantize_mx_op(w.detach().contiguous(), (SIZE if tiles else 1, SIZE)))


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    powers = power_of_e8m0(scales.to(torch.int32))
    rows = powers if scales.shape[-2] == codes.shape[-2] else powers.repeat_interleave(SIZE, -2)
    spread = rows[..., : codes.shape[-2], :].repeat_interleave(SIZE, -1)[..., : codes.shape[-1]]
    return (codes.to(torch.float32) * spread).to(dtype)


def by_rows(weight: MXWeight) -> MXWeight:
    """The same weight with a scale for every 32 values of a row, as checkpoints have it."""
    if weight.scales.shape[0] == weight.codes.shape[0]:
        return weight
    rows = weight.scales.repeat_interleave(SIZE, 0)[: weight.codes.shape[0]]
    return MXWeight(weight.codes, rows.contiguous())


def by_tiles(weight: MXWeight) -> MXWeight:
    """The same weight with a scale per tile, where the rows of every tile have the same scales."""
    n = weight.codes.shape[0]
    if weight.scales.shape[0] != n or n <= 1:
        return weight
    whole = F.pad(weight.scales, (0, 0, 0, -n % SIZE), mode="constant", value=0)
    whole[n:] = weight.scales[-1]
    tiles = whole.view(-1, SIZE, whole.shape[1])
    return MXWeight(weight.codes, tiles[:, 0].contiguous()) if bool((tiles == tiles[:, :1]).all()) else weight


def round_inputs(x: Tensor) -> Tensor:
    """x [M, K] as the product will see it, in its own dtype."""
    return dequantize_mx(*quantize_mx(x, INPUTS), INPUTS).to(x.dtype)


dequantize_op = define_dequantize("mx_dequantize", dequantize)
dequantize_rounding_op = define_dequantize_rounding("mx_dequantize_experts_rounding", dequantize)
round_inputs_op = define_round_inputs("mx_round_inputs", round_inputs)
