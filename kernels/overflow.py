"""Remember whether gradients were finite.

    largest' = max(largest, max |g| of all g)        NaN wins over Inf over all numbers

largest: [1] fp32, 0 to begin with. It is not finite if any gradient since then was not.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from .define_op import define


def largest_magnitude(g: Tensor) -> Tensor:
    """max |g| in FP32, [1]; g is not empty."""
    return g.abs().amax().reshape(1).to(torch.float32)


def raise_overflow(largest: Tensor, magnitudes: Sequence[Tensor]) -> Tensor:
    """The formula above from what :func:`largest_magnitude` gave for each gradient."""
    return torch.cat([largest, *magnitudes]).amax(0, keepdim=True)  # amax passes NaN on


raise_overflow_op = define(
    "raise_overflow(Tensor largest, Tensor[] magnitudes) -> Tensor",
    raise_overflow,
    lambda largest, magnitudes: largest.new_empty(1),
)
