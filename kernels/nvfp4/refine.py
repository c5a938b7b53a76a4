"""Descent from a rounded matrix: some blocks take what is best given all others, or all codes are searched again.

    minimise (q - w)^T H (q - w)
    a window:   t = q_b - H_bb^-1 (H (q - w))_b        what a few blocks would be if they could be anything;
                t is rounded as by GPTQ with H_bb, scales and codes, and taken by the rows in which that is better
    codes:      ``code_search.py``, under the scales there are

Rows take what is better, so what comes out is never worse than what went in, under the H that is given. Windows are
drawn again for every pass, from a fixed seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .code_search import search_codes
from .curvature import inverse_factor
from .feedback import TO_ZERO, round_blocks
from .scale_paths import best_scales

WINDOW = 4  # blocks
PATHS = 2  # ways to choose its scales; more gained nothing
MARGIN = 1e-5  # of a window's error, that a change has to win: more than FP32 may be wrong by


def refine(
    weights: Tensor,
    values: Tensor,
    scales: Tensor,
    kept_zero: Tensor,
    hessian: Tensor,
    passes: int,
    steps: int,
    candidates: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """weights: [K, N], columns of the matrix as rows, and their values by their scales; scales: [K/B, N]; kept_zero:
    bool [K/B, N], blocks that stay zeros; hessian: [K, K], positive definite -> values by their scales, scales."""
    descent = _Descent(weights, values, scales, kept_zero, hessian)
    generator = torch.Generator().manual_seed(0)
    descent.search(steps)
    for _ in range(passes):
        for window in torch.randperm(len(scales), generator=generator).split(WINDOW):
            descent.solve(window.sort().values.to(weights.device), candidates)
        descent.search(steps)
    return descent.values / descent.scales.repeat_interleave(descent.size, 0), descent.scales


class _Descent:
    def __init__(self, weights: Tensor, values: Tensor, scales: Tensor, kept_zero: Tensor, hessian: Tensor) -> None:
        self.scales, self.kept_zero, self.hessian = scales.clone(), kept_zero, hessian
        self.size = len(weights) // len(scales)
        self.values = self._scaled(values, scales)
        self.weights, self.gradient = weights, hessian @ (self.values - weights)

    def _scaled(self, values: Tensor, scales: Tensor) -> Tensor:
        return (values.view(len(scales), self.size, -1) * scales.unsqueeze(1)).view(values.shape)

    def solve(self, blocks: Tensor, candidates: tuple[int, int]) -> None:
        """Choose scales and codes of some blocks again."""
        here = (blocks.unsqueeze(1) * self.size + torch.arange(self.size, device=blocks.device)).flatten()
        lines = self.hessian[here]  # or columns: it is symmetric
        within, before, zero = lines[:, here], self.values[here], self.kept_zero[blocks]
        factor = inverse_factor(within)
        distance = factor.t() @ (factor @ self.gradient[here])
        target = before - distance
        scales = best_scales(target.t().contiguous(), zero.t(), factor, self.size, PATHS, candidates).t().contiguous()
        proposed = self._scaled(round_blocks(target, torch.where(zero, TO_ZERO, scales), factor), scales)
        better = _quadratic(proposed - target, within) < (1 - MARGIN) * _quadratic(distance, within)
        self.values[here] = torch.where(better, proposed, before)
        self.scales[blocks] = torch.where(better, scales, self.scales[blocks])
        self.gradient.addmm_(lines.t(), torch.where(better, proposed - before, 0.0))

    def search(self, steps: int) -> None:
        """Choose all codes again, under the present scales."""
        every = self.scales.repeat_interleave(self.size, 0)
        scales = torch.where(self.kept_zero, 0.0, self.scales).t()
        found = search_codes((self.values / every).t(), scales, self.gradient.t(), self.hessian, steps)
        change = found.t() * every - self.values
        # By the gradient there is now: what the search has added up is a little wrong by its end.
        turned = self.hessian @ change
        won = -((2.0 * self.gradient + turned) * change).sum(0)
        better = won > MARGIN * ((self.values - self.weights) * self.gradient).sum(0)
        self.values += torch.where(better, change, 0.0)
        self.gradient += torch.where(better, turned, 0.0)


def _quadratic(e: Tensor, hessian: Tensor) -> Tensor:
    return (hessian @ e).mul_(e).sum(0)
