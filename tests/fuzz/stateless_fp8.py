"""FP8 without memory: a mode under which every product of an eager model is a tensorwise FP8 product.

    q(x) = fp8(x * F / amax(x)) * amax(x) / F          F: the largest value of the format
    y = q(x) @ q(w)     dx = q(dy) @ q(w).T     dw = q(x).T @ q(dy)       inputs and weights in E4M3, dy in E5M2

Nothing here is shared with the engine. Everything but the cast is in the dtype of the operands, which is FP64 in the
tests, so that the noise of the result is FP8's alone.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class StatelessFp8(TorchFunctionMode):
    """Replace the products of what runs under it, and those of its backward.

    ``luck`` moves each scale by a random factor between 1/2 and 1. All such scales are equally good, and rounding falls
    differently under each: several runs show how much of a result's noise is luck.
    """

    def __init__(self, luck: torch.Generator | None = None) -> None:
        super().__init__()
        self.luck = luck

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is functional.linear:
            return self._linear(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            return _Product.apply(*args, self._round)
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = _Product.apply(x, weight.t(), self._round)
        return y if bias is None else y + bias

    def _round(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The values that FP8 has for a tensor."""
        amax = x.abs().max()
        if amax == 0:
            return x
        scale = torch.finfo(dtype).max / amax
        if self.luck is not None:
            scale = scale * 2.0 ** -torch.rand((), generator=self.luck, dtype=x.dtype)
        return (x * scale).float().to(dtype).to(x.dtype) / scale


_PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


class _Product(torch.autograd.Function):
    """``left [..., M, K] @ right [K, N]``."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, rounded: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
        q_left, q_right = rounded(left, E4M3), rounded(right, E4M3)
        ctx.save_for_backward(q_left, q_right)
        ctx.rounded = rounded
        return q_left @ q_right

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        q_left, q_right = ctx.saved_tensors
        q_grad = ctx.rounded(grad_output, E5M2)
        rows = q_left.reshape(-1, q_left.shape[-1])
        return q_grad @ q_right.t(), rows.t() @ q_grad.reshape(-1, q_grad.shape[-1]), None
