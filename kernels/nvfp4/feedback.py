"""Rounding weights one after the other, each error made up for by those that come later.

    U: upper triangular, U^T U = H^-1
    for each weight j:   e_j = (w_j - q_j) / U_jj,      w_k -= e_j * U_jk  for k > j,      cost = sum e_j**2

The cost is (q - w)^T H (q - w). Columns of the matrix are rows of memory, so that what is done to all rows of the
matrix runs along memory. Weights are in units of the global scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels.cpu import nvfp4_search

from . import e2m1

TO_ZERO = 2.0**30  # a scale under which every weight rounds to zero


class Rounding:
    """One block of B weights. within: its part of U, [B, B]."""

    def __init__(self, within: Tensor) -> None:
        diagonal = within.diagonal()
        self.feed = within / diagonal.unsqueeze(1)
        self.price = diagonal.square().reciprocal()  # of a squared error
        self.inverse_diagonal = diagonal.reciprocal().unsqueeze(1)

    def misses(self, y: Tensor, rounded: Tensor | None = None) -> Tensor:
        """y: weights by their scale, [B, n] -> what rounding missed, in that unit too, [B, n]; ``rounded`` [B, n] is
        filled with what they became."""
        missed = torch.empty_like(y)
        step = torch.empty_like(y[0])
        for j in range(len(y)):
            now = torch.addmv(y[j], missed[:j].t(), self.feed[:j, j], alpha=-1.0) if j else y[0]
            nearest = now.clone() if rounded is None else rounded[j].copy_(now)
            torch.sub(now, e2m1.round_(nearest, step), out=missed[j])
        return missed

    def cost(self, missed: Tensor, scales: Tensor) -> Tensor:
        """sum of e**2, [n]."""
        return (self.price @ missed.square()).mul_(scales).mul_(scales)

    def errors(self, missed: Tensor, scales: Tensor) -> Tensor:
        """e, [B, n]."""
        return missed * self.inverse_diagonal * scales


def round_blocks(weights: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """All blocks under given scales. weights: [K, N], scales: [K/B, N], factor: U, [K, K] -> values by their scale, [K,
    N]."""
    weights, rounded = weights.clone(), torch.empty_like(weights)
    size = len(weights) // len(scales)
    kernels = nvfp4_search.search_library() if weights.device.type == "cpu" else None
    for block, scale in enumerate(scales):
        here, rest = slice(block * size, (block + 1) * size), slice((block + 1) * size, None)
        rounding = Rounding(factor[here, here])
        y = weights[here] * scale.reciprocal()
        if kernels is None:
            missed = rounding.misses(y, rounded[here])
        else:
            missed = nvfp4_search.round_block(kernels, y, factor[here, here], rounded[here])
        weights[rest].addmm_(factor[here, rest].t(), rounding.errors(missed, scale), alpha=-1.0)
    return rounded
