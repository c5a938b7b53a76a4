"""What became of a tensor that was quantized in blocks: the counts of ``stats=True`` for MXFP8 and NVFP4.

    elements       finite ones
    overflow       of them, those whose block's scale can't grow any more, and which are cut off
    underflow      not zero, but zero once quantized
    signal, noise  sums of x**2 and of (x - dequantized)**2
    blocks         those that are finite and not all zero
    at_ends        of them, those whose scale is the smallest or the largest that the format of scales has

    MXFP8          scale = amax / 448, rounded up to a power of two        ends: 2**-127, 2**127
    NVFP4          scale = amax * enc / 6 in E4M3                          ends: 2**-9, 448

x: [R, C]; back: [R, C] fp32, what the codes stand for; enc [1, 1] -> [7] fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .delayed_scaling import ABOVE_ROUNDING
from .quantize import Block, block_amax, spread

_MX_SMALLEST, _MX_LARGEST = 2.0**-127, 2.0**126  # above the latter a scale is rounded up to the largest
_NVFP4_SMALLEST, _NVFP4_LARGEST = 2.0**-9, 448.0


def count_mx(x: Tensor, back: Tensor, block: Block) -> Tensor:
    amax = block_amax(x, block)
    return _count(x, back, amax, amax * (1.0 / 448.0), _MX_SMALLEST, _MX_LARGEST, block)


def count_nvfp4(x: Tensor, back: Tensor, enc: Tensor, block: Block) -> Tensor:
    amax = block_amax(x, block)
    return _count(x, back, amax, amax * (enc * (1.0 / 6.0)), _NVFP4_SMALLEST, _NVFP4_LARGEST, block)


def _count(
    x: Tensor, back: Tensor, amax: Tensor, scale: Tensor, smallest: float, largest: float, block: Block
) -> Tensor:
    finite = x.abs() < torch.inf
    wide, back = (torch.where(finite, tensor.to(torch.float32), 0.0) for tensor in (x, back))
    cut = finite & (wide.abs() > spread(amax * (largest / scale) * ABOVE_ROUNDING, x.shape, block))
    flushed = (wide != 0) & (back == 0)
    some = (amax > 0) & (amax < torch.inf)
    at_ends = some & ((scale <= smallest) | (scale >= largest))
    wide, noise = wide.to(torch.float64), wide.to(torch.float64) - back.to(torch.float64)
    noise = torch.where(noise.abs() < torch.inf, noise, 0.0)  # of finite elements in a block that is not finite
    parts = (finite, cut, flushed, wide * wide, noise * noise, some, at_ends)
    return torch.stack([part.sum(dtype=torch.float64) for part in parts])
