"""Round to nearest: the block's largest element is 6 times its scale.

    global_scale = amax / (448 * 6)
    s            = e4m3(clamp((amax_b / 6) / global_scale, 2**-9, 448))
    codes        = e2m1(clamp(x * ((1 / global_scale) / s), -6, 6))

All in FP32 in that order: bit-equal to torchao's NVFP4 where its floor of 2**-6 for block scales does not bind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .weight import SMALLEST_SCALE, block_scale_of, blocks_of, encode


def quantize(
    w: Tensor, global_scale: Tensor, block_size: int = 16, smallest: float = SMALLEST_SCALE
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of an [N, K] matrix. A NaN makes its block's scale NaN. A global scale of 0 counts as
    1."""
    blocks = blocks_of(w, block_size)
    global_scale = torch.where(global_scale == 0, 1.0, global_scale)
    block_scales = block_scale_of(blocks.abs().amax(-1), global_scale, smallest)
    return encode(blocks, block_scales, global_scale), block_scales
