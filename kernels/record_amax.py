"""Record the largest magnitude of a tensor in a slot, inside whatever kernel computes the tensor.

    amaxes[slot] = max(amaxes[slot], max |x|)        x: any shape; amaxes: [C] fp32; NaN wins over Inf over all numbers

A reduction of a whole tensor is a kernel of its own in Inductor, or two. On a GPU this operation is a store instead
(``kernels/inductor/record_amax.py``), which Inductor fuses like any other store into the producer of x.
"""

from __future__ import annotations

import torch

from .define_op import define
from .quantize import WHOLE, block_amax


def record_amax(amaxes: torch.Tensor, x: torch.Tensor, slot: int) -> None:
    """The formula above in plain PyTorch."""
    bits = block_amax(x.reshape(1, -1), (WHOLE, WHOLE)).reshape(()).view(torch.int32)
    recorded = amaxes.data.view(torch.int32)
    recorded[slot] = torch.maximum(recorded[slot], bits)


record_amax_op = define(
    "record_amax(Tensor(a!) amaxes, Tensor x, int slot) -> ()", record_amax, lambda amaxes, x, slot: None
)
