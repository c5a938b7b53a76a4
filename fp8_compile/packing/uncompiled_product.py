"""Products with packed weights outside of a compiler, from their packed form in forward and in backward.

``F.linear(x, dequantized)`` would save the dequantized weight until backward has run: the model in full size again.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

Map = Callable[..., Tensor]  # (rows, *parts) -> rows


class _LinearMap(torch.autograd.Function):
    """``forward(x, *parts)``, linear in x; its gradient is ``backward(grad, *parts)``, and that one's is ``forward``.

    The parts are saved as they are: autograd refuses a backward whose weights have been overwritten since.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map, *parts: Tensor) -> Tensor:
        ctx.maps = forward, backward
        ctx.save_for_backward(*parts)
        return forward(x, *parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        forward, backward = ctx.maps
        parts = ctx.saved_tensors
        grad = _LinearMap.apply(grads[0], backward, forward, *parts)
        return grad, None, None, *(None for _ in parts)


def product(x: Tensor, forward: Map, backward: Map, *parts: Tensor) -> Tensor:
    """``forward(x, *parts)``, with a gradient where one is wanted."""
    if torch.is_grad_enabled() and x.requires_grad:
        y: Tensor = _LinearMap.apply(x, forward, backward, *parts)
        return y
    return forward(x, *parts)


def autocast(x: Tensor) -> Tensor:
    """x in the dtype that ``torch.autocast`` has a linear layer compute in."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x
