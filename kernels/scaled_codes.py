"""What the formats of E4M3 weights have in common: a matrix of codes, and scales that multiply them."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Self

import torch
from torch import Tensor

from .define_op import define
from .formats import E4M3


class ScaledCodes(NamedTuple):
    """An [N, K] matrix: codes e4m3 [N, K], and scales of as many of them as the format says."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        return type(self)(self.codes.to(device), self.scales.to(device))


def scale_of(amax: Tensor, name: str) -> Tensor:
    """``amax / 448``, 1 for zeros; a ValueError with the weight's name where an amax is not finite."""
    check_finite(amax, name)
    return torch.where(amax == 0, 1.0, (amax / E4M3.max).clamp(min=torch.finfo(torch.float32).tiny))


def check_finite(values: Tensor, name: str) -> None:
    if not bool(values.isfinite().all()):
        raise ValueError(f"{name}: weights are Inf or NaN, expected finite ones; repair them, or exclude the layer")


def define_dequantize(name: str, formula: Callable[..., Tensor]) -> Any:
    """``formula(codes, scales, dtype)`` as an operation."""
    return define(
        f"{name}(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor",
        formula,
        lambda codes, scales, dtype: codes.new_empty(codes.shape, dtype=dtype),
    )


def define_dequantize_rounding(name: str, formula: Callable[..., Tensor]) -> Any:
    """The same of a stack of matrices, or of those that ``which`` names. It says that what is multiplied by them is
    rounded first: in the graph ``passes/joint/multiply_packed.py`` does that."""

    def looked_up(codes: Tensor, scales: Tensor, dtype: torch.dtype, which: Tensor | None = None) -> Tensor:
        if which is not None:
            codes, scales = codes.view(torch.uint8)[which].view(codes.dtype), scales[which]
        return formula(codes, scales, dtype)

    return define(
        f"{name}(Tensor codes, Tensor scales, ScalarType dtype, Tensor? which=None) -> Tensor",
        looked_up,
        lambda codes, scales, dtype, which=None: codes.new_empty(
            (*(codes.shape[:1] if which is None else which.shape), *codes.shape[1:]), dtype=dtype
        ),
    )


def define_round_inputs(name: str, formula: Callable[[Tensor], Tensor]) -> Any:
    """``formula(x)``, whose gradient is as if the rounding were not there."""
    return define(
        f"{name}(Tensor x) -> Tensor",
        formula,
        lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
        gradient=lambda ctx, grad: grad,
    )
