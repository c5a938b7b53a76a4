"""Weights in FP8 by blocks, as DeepSeek and Qwen publish theirs: E4M3, one scale per 128 x 128 block.

    scale = amax(block) / 448, 1 for a block of zeros;   q = e4m3(w / scale);   w = q * scale

codes: e4m3 [N, K]; scales: fp32 [ceil(N / 128), ceil(K / 128)]; blocks at the edges are smaller. A stack of matrices
has one more dimension in front. Inputs [M, K] may be rounded too, by blocks of 1 x 128 along K as they come
(``kernels/quantize.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .formats import E4M3
from .quantize import dequantize as dequantize_inputs
from .quantize import quantize as quantize_inputs
from .scaled_codes import ScaledCodes, define_dequantize, define_round_inputs, scale_of

BLOCK = 128
ACTIVATIONS = (None, "fp8")
INPUTS = (1, BLOCK)


class FP8Blocks(ScaledCodes):
    """An [N, K] matrix in FP8 by blocks."""

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(self.codes, self.scales, dtype)


def quantize(w: Tensor, name: str = "weight") -> FP8Blocks:
    """Codes and scales of an [N, K] matrix."""
    wide = w.detach().to(torch.float32)
    n, k = wide.shape
    whole = F.pad(wide, (0, -k % BLOCK, 0, -n % BLOCK))
    amax = whole.view(-(-n // BLOCK), BLOCK, -(-k // BLOCK), BLOCK).abs().amax((1, 3))
    scales = scale_of(amax, name)
    return FP8Blocks((wide / _spread(scales, n, k)).clamp_(-E4M3.max, E4M3.max).to(E4M3.dtype), scales)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return (codes.to(torch.float32) * _spread(scales, codes.shape[-2], codes.shape[-1])).to(dtype)


def round_inputs(x: Tensor) -> Tensor:
    """x [M, K] as the product will see it, in its own dtype."""
    return dequantize_inputs(*quantize_inputs(x.contiguous(), E4M3.dtype, INPUTS), INPUTS).to(x.dtype)


def _spread(scales: Tensor, n: int, k: int) -> Tensor:
    """The scale of every weight."""
    rows = scales.repeat_interleave(BLOCK, -2)[..., :n, :]
    return rows.repeat_interleave(BLOCK, -1)[..., :k]


dequantize_op = define_dequantize("fp8_blocks_dequantize", dequantize)
round_inputs_op = define_round_inputs("fp8_blocks_round_inputs", round_inputs)
