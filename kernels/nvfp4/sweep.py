"""The scale of each block by squared error: of all 126, or of two.

    sweep           s = argmin over all E4M3 numbers of  sum((s * e2m1(x / s) - x)**2)
    four_over_six   the same of two: the largest element is 6 times the scale, or 4 times

Four over six (Cook et al., 2025): between 4 and 6 E2M1 has nothing, so that a block whose large elements are close
together is better off with 4 as its largest value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import e2m1
from .scale_search import best_scales, squared_error
from .weight import E4M3_MAX, SCALE_DTYPE, SMALLEST_SCALE, block_scale_of, blocks_of, chunks, encode


def quantize(w: Tensor, global_scale: Tensor, block_size: int = 16) -> tuple[Tensor, Tensor]:
    """Codes and block scales of an [N, K] matrix."""
    blocks = blocks_of(w, block_size)
    start = block_scale_of(blocks.abs().amax(-1), global_scale)
    block_scales = torch.empty_like(start)
    for part in chunks(blocks.shape[0], blocks.shape[1] * block_size):
        x = columns_of(blocks[part], global_scale)
        block_scales[part] = best_scales(x, start[part].flatten())[0].view(start[part].shape)
    return encode(blocks, block_scales, global_scale), block_scales


def four_over_six(w: Tensor, global_scale: Tensor, block_size: int = 16) -> tuple[Tensor, Tensor]:
    """Codes and block scales of an [N, K] matrix."""
    blocks = blocks_of(w, block_size)
    amax = blocks.abs().amax(-1)
    six = block_scale_of(amax, global_scale)
    four = (amax / 4.0 / global_scale).clamp(SMALLEST_SCALE, E4M3_MAX).to(SCALE_DTYPE)
    block_scales = torch.empty_like(six)
    for part in chunks(blocks.shape[0], blocks.shape[1] * block_size):
        x = columns_of(blocks[part], global_scale)
        errors = [_error(x, scales[part].flatten()) for scales in (six, four)]
        better = (errors[1] < errors[0]).view(six[part].shape)
        by_four, by_six = (scales[part].view(torch.uint8) for scales in (four, six))
        block_scales[part] = torch.where(better, by_four, by_six).view(SCALE_DTYPE)
    return encode(blocks, block_scales, global_scale), block_scales


def columns_of(blocks: Tensor, global_scale: Tensor) -> Tensor:
    """[R, C, B] -> [B, R * C] in units of the global scale: what is done to all blocks runs along memory."""
    return (blocks * (1.0 / global_scale)).flatten(0, 1).t().contiguous()


def _error(x: Tensor, scale: Tensor) -> Tensor:
    s = scale.to(torch.float32)
    return squared_error(e2m1.rounded(x / s).mul_(s).sub_(x))
