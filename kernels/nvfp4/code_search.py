"""Codes under given scales by tabu search (Glover, 1986), every row by itself.

    minimise (q - w)^T H (q - w),      g = H (q - w)
    a move:   weight j takes the next value against its gradient, which is d_j away; the error changes by
              d_j (2 g_j + d_j H_jj)

Every step makes the move that changes the error by the least, be it for the worse: that is the way out of a local
optimum. A weight that has moved stays for sqrt(K) to 2 sqrt(K) steps, unless its move would make the error the least
so far. At the end the row takes the best that it came by.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8_compile.kernels.cpu import nvfp4_search

from . import e2m1

LEVELS = (*(-value for value in e2m1.VALUES[:0:-1]), *e2m1.VALUES)  # the 15 values of E2M1 in order
MIDDLE = len(LEVELS) // 2
NEVER = 1e30  # what a move costs that is not to be made; beyond the ends of E2M1 it costs Inf


def search_codes(values: Tensor, scales: Tensor, gradient: Tensor, hessian: Tensor, steps: int) -> Tensor:
    """values: [N, K], of E2M1; scales: [N, K/B], 0 where a block stays as it is; gradient: [N, K], hessian: [K, K], all
    FP32 -> values."""
    if not steps:
        return values
    codes = e2m1.codes_of(values).to(torch.int8)
    levels = torch.where(codes < 8, codes, 8 - codes).add_(MIDDLE)
    tenure = max(math.isqrt(values.shape[1]), 1)
    kernels = nvfp4_search.search_library() if values.device.type == "cpu" else None
    if kernels is None:
        levels = reference(levels, scales, gradient, hessian, steps, tenure)
    else:
        levels = nvfp4_search.code_search(kernels, levels, scales, gradient, hessian, steps, tenure)
    return torch.tensor(LEVELS, device=values.device)[levels.to(torch.int32)]


def reference(levels: Tensor, scales: Tensor, gradient: Tensor, hessian: Tensor, steps: int, tenure: int) -> Tensor:
    """The same in PyTorch, all rows in step. levels: int8 [N, K], places in ``LEVELS``."""
    rows, columns = levels.shape
    level, gradient = levels.to(torch.int64), gradient.clone()
    values = torch.tensor(LEVELS, device=levels.device)
    every = scales.repeat_interleave(columns // scales.shape[1], 1)
    diagonal, row = hessian.diagonal(), torch.arange(rows, device=levels.device)
    until = torch.zeros_like(level)
    now = torch.zeros(rows, dtype=torch.float64, device=levels.device)
    best, best_level, going = now.clone(), level.clone(), torch.ones(rows, dtype=torch.bool, device=levels.device)
    for step in range(steps):
        direction = torch.where(gradient > 0, -1, 1)
        beside = level + direction
        there = (beside >= 0) & (beside < len(LEVELS)) & (every > 0)
        by = (values[beside.clamp(0, len(LEVELS) - 1)] - values[level]) * every
        by = torch.where(there, by, math.inf * direction)
        change = by * (2.0 * gradient + by * diagonal)
        change.masked_fill_((until > step) & ~(change < (best - now).to(torch.float32).unsqueeze(1)), NEVER)
        least = change.amin(1)
        at = (change == least.unsqueeze(1)).to(torch.int8).argmax(1)
        going &= least < NEVER
        moved = torch.where(going, by[row, at], 0.0)
        level[row, at] += torch.where(going, direction[row, at], 0)
        gradient += moved.unsqueeze(1) * hessian[at]
        until[row, at] = step + 1 + tenure + 7 * step % tenure
        now += torch.where(going, least, 0.0)
        better = now < best
        best = torch.where(better, now, best)
        best_level[better] = level[better]
    return best_level.to(torch.int8)
