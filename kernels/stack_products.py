"""Products of pairs of numbers, all in one tensor.

    y[i] = left[i] * right[i]              left, right: n tensors of one fp32 each -> y: [n]

Each product is a kernel of its own to Inductor, and a launch takes as long as a small gemm. On a GPU this operation is
one kernel for all of them (``kernels/inductor/stack_products.py``).
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from .define_op import define


def stack_products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The formula above in plain PyTorch."""
    return torch.stack([a.reshape(()) * b.reshape(()) for a, b in zip(left, right, strict=True)])


stack_products_op = define(
    "stack_products(Tensor[] left, Tensor[] right) -> Tensor",
    stack_products,
    lambda left, right: left[0].new_empty(len(left)),
)
