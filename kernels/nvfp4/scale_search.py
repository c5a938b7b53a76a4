"""The best E4M3 scale of each block, out of all 126, for an error that is a quadratic form.

    error(s) = objective(s * e2m1(x / s) - x)              x: a block in units of the global scale
    objective(e) >= least * sum(e**2)

Most scales need not be tried. A scale below ``(max|x| - r) / 6`` clips the largest element by more than r; one above
``4 t`` flushes all elements below t to zero. Where the squared error that follows is above what the objective
of the first try allows, ``best / least``, no such scale can win: the search is exhaustive in effect.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from . import e2m1
from .weight import SCALE_CODES, SCALE_DTYPE

Objective = Callable[[Tensor], Tensor]  # errors [B, n], scratch that may be overwritten -> [n]
FIRST, LAST = SCALE_CODES[0], SCALE_CODES[-1]
TRIED_FLUSHES = (1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # scales, as multiples of the one that makes the largest element 6


def squared_error(error: Tensor) -> Tensor:
    return error.square_().sum(0)


def best_scales(
    x: Tensor, start: Tensor, objective: Objective = squared_error, least: float = 1.0
) -> tuple[Tensor, Tensor]:
    """x: FP32 [B, n], one block per column; start: e4m3 [n], tried first and kept in a tie -> e4m3 [n], its objective
    [n]."""
    first = start.view(torch.uint8).to(torch.int32)
    scratch = torch.empty_like(x), torch.empty_like(x)
    best = _objective_at(x, first, objective, *scratch)
    low, high = _candidates(x, best, least, scratch)
    # The blocks with the most candidates in front, so that those still searching are always the first few.
    length, order = torch.sort(high - low + 1, descending=True)
    still = torch.bincount(length.clamp(min=0), minlength=LAST + 1).flip(0).cumsum(0).flip(0).tolist()
    x, low, start_code, best = x[:, order], low[order], first[order], best[order]
    code = start_code.clone()
    for offset in range(int(length[0]) if length.numel() else 0):
        n = still[offset + 1]
        candidate = low[:n] + offset
        error = _objective_at(x[:, :n], candidate, objective, *(one[:, :n] for one in scratch))
        better = error < best[:n]
        torch.where(better, error, best[:n], out=best[:n])
        torch.where(better, candidate, code[:n], out=code[:n])
    inverse = torch.argsort(order)
    return code[inverse].to(torch.uint8).view(SCALE_DTYPE), best[inverse]


def _objective_at(x: Tensor, code: Tensor, objective: Objective, y: Tensor, step: Tensor) -> Tensor:
    scale = code.to(torch.uint8).view(SCALE_DTYPE).to(torch.float32)
    torch.mul(x, scale.reciprocal(), out=y)
    return objective(e2m1.round_(y, step).mul_(scale).sub_(x))


def _candidates(x: Tensor, best: Tensor, least: float, scratch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """First and last scale, as E4M3 bytes, that could have a smaller objective than ``best``."""
    largest = x.abs().amax(0)
    # A hair more than follows, for what rounding does to either side.
    allowed = best / least * (1 + 1e-4) if least > 0 else torch.full_like(best, torch.inf)
    lowest = (largest - allowed.sqrt()) / e2m1.LARGEST
    highest = 4 * largest
    square, kept = scratch
    torch.square(x, out=square)
    for multiple in reversed(TRIED_FLUSHES):
        threshold = largest * (multiple / 24)  # a quarter of ``multiple`` times the scale that makes the largest 6
        torch.mul(square, square < threshold.square(), out=kept)
        torch.where(kept.sum(0) > allowed, multiple / e2m1.LARGEST * largest, highest, out=highest)
    return _code_near(lowest, -1), _code_near(highest, +1)


def _code_near(scale: Tensor, beside: int) -> Tensor:
    """The byte of the E4M3 number nearest to a scale, or the one beside it, so that rounding excludes nothing."""
    byte = scale.clamp(0.0, 448.0).to(SCALE_DTYPE).view(torch.uint8).to(torch.int32)
    return (byte + beside).clamp_(FIRST, LAST)
