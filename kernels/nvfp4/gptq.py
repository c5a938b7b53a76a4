"""GPTQ: what rounding a weight does to the output is made up for by the weights that are not rounded yet.

    U: upper triangular, U^T U = (H + damping * mean(diag H) * I)^-1
    for each weight j:   e_j = (w_j - q_j) / U_jj,      w_k -= e_j * U_jk  for k > j,      cost = sum e_j**2

(Frantar et al., 2022.) The scale of a block is the one with the least cost of the whole block, found by rounding its 16
weights one after the other under every candidate, errors fed forward: the cost is exactly what the block will add to
the output's error. Blocks go in order of Hessian energy, the trace of their part of it: those that matter most are
rounded while most others can still make up for it. At the end some passes of coordinate descent (``refine.py``) let
the weights that were rounded first see what became of the others.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from tqdm import tqdm

from . import e2m1
from .hessian import filled
from .refine import refine
from .scale_search import FIRST, LAST
from .weight import E4M3, SMALLEST_SCALE, block_scale_of, blocks_of, chunks

ORDERS = ("energy", "natural")


@dataclasses.dataclass(frozen=True)
class Options:
    """``candidates``: E4M3 numbers below and above the scale that makes the block's largest weight 6; ``passes`` of
    coordinate descent."""

    damping: float = 0.01
    order: str = "energy"
    candidates: tuple[int, int] = (6, 12)
    passes: int = 3

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"gptq: order={self.order!r} is unknown; expected one of: {', '.join(ORDERS)}")
        if not 0 < self.damping < float("inf"):
            raise ValueError(f"gptq: damping expects a finite number above 0, got {self.damping!r}")


def quantize(
    w: Tensor,
    global_scale: Tensor,
    hessian: Tensor,
    block_size: int = 16,
    options: Options | None = None,
    progress: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of an [N, K] matrix; hessian: [K, K]."""
    options = options or Options()
    blocks = blocks_of(w, block_size)
    rows, count, size = blocks.shape
    hessian = filled(hessian, blocks)
    order = column_order(hessian, count, options.order)
    factor = inverse_factor(hessian[order][:, order], options.damping)
    # Columns of weights as rows of memory, in units of the global scale.
    weights = (blocks.flatten(1) * (1.0 / global_scale)).t()[order].contiguous()
    original = weights.clone() if options.passes else weights
    codes = torch.empty(count * size, rows, dtype=torch.uint8, device=w.device)
    block_scales = torch.empty(rows, count, dtype=E4M3, device=w.device)
    for start in tqdm(range(0, count * size, size), desc="gptq", disable=not progress, leave=False):
        here, rest = slice(start, start + size), slice(start + size, None)
        within, kept_zero = factor[here, here], ~blocks[:, int(order[start]) // size].any(1)
        errors = torch.empty_like(weights[here])
        for part in chunks(rows, size * sum(options.candidates)):
            scales = _best_scales(weights[here, part], within, options.candidates)
            # What was all zeros stays so: its error is fed forward like any other.
            inverse = torch.where(kept_zero[part], 0.0, scales.reciprocal())
            codes[here, part], errors[:, part] = _round_block(weights[here, part], scales, inverse, within)
            block_scales[part, int(order[start]) // size] = scales.to(E4M3)
        weights[rest] -= factor[here, rest].t() @ errors
    if options.passes:
        scales = block_scales[:, order[::size] // size].t().to(torch.float32)
        values = e2m1.values_of(codes).view(count, size, rows).mul_(scales.unsqueeze(1)).view(count * size, rows)
        kept_zero = ~blocks.any(2).t()[order[::size] // size]
        inverse = torch.where(kept_zero, 0.0, scales.reciprocal())
        curvature = damped(hessian, options.damping)[order][:, order]
        codes = refine(original, values, scales, inverse, curvature, options.passes)
    natural = torch.empty_like(codes)
    natural[order] = codes
    return e2m1.pack(natural.t().contiguous()), block_scales


def column_order(hessian: Tensor, count: int, order: str) -> Tensor:
    """Which column is rounded when: blocks by energy, and the columns of a block by theirs."""
    energy = hessian.diagonal().view(count, -1)
    if order == "natural":
        return torch.arange(energy.numel(), device=hessian.device)
    within = energy.argsort(1, descending=True) + energy.shape[1] * torch.arange(count, device=hessian.device)[:, None]
    return within[energy.sum(1).argsort(descending=True)].flatten()


def damped(hessian: Tensor, damping: float) -> Tensor:
    """``H + damping * mean(diag H) * I``."""
    return hessian + damping * _mean_diagonal(hessian) * torch.eye(len(hessian), device=hessian.device)


def _mean_diagonal(hessian: Tensor) -> Tensor:
    mean = hessian.diagonal().mean()
    return torch.where(mean > 0, mean, 1.0)  # a layer that only saw zeros


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U with ``U^T U = (H + damping * mean(diag H) * I)^-1``. More damping where that is not positive definite."""
    mean = _mean_diagonal(hessian)
    # Reversed, the lower Cholesky factor of H is an upper one; its inverse is the factor of H's inverse.
    reversed_ = hessian.flip(0, 1).double()
    for attempt in range(6):
        ridge = damping * 10.0**attempt * mean.double()
        factor, failed = torch.linalg.cholesky_ex(reversed_ + ridge * torch.eye(len(hessian), device=hessian.device))
        if not failed:
            identity = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
            inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
            return inverse.flip(0, 1).to(torch.float32)
    raise ValueError("gptq: the Hessian is not positive semidefinite; calibrate on more tokens or raise damping")


def _best_scales(weights: Tensor, within: Tensor, candidates: tuple[int, int]) -> Tensor:
    """weights: [B, n] -> FP32 [n]."""
    n = weights.shape[1]
    start = (
        block_scale_of(weights.abs().amax(0), weights.new_ones(()), SMALLEST_SCALE).view(torch.uint8).to(torch.int32)
    )
    offsets = torch.arange(-candidates[0], candidates[1] + 1, device=weights.device)
    byte = (start + offsets[:, None]).clamp_(FIRST, LAST)  # [C, n]
    scales = byte.to(torch.uint8).view(E4M3).to(torch.float32)
    tried = weights.unsqueeze(1).expand(-1, len(offsets), n).flatten(1)
    _, errors = _round_block(tried, scales.flatten(), scales.flatten().reciprocal(), within, coded=False)
    best = errors.square_().sum(0).view(len(offsets), n).argmin(0, keepdim=True)
    return scales.gather(0, best).squeeze(0)


def _round_block(
    weights: Tensor, scales: Tensor, inverse: Tensor, within: Tensor, coded: bool = True
) -> tuple[Tensor | None, Tensor]:
    """Round B weights one after the other, errors fed forward. weights: [B, n] -> codes [B, n], e [B, n]."""
    size = weights.shape[0]
    errors = torch.empty(weights.shape, device=weights.device)
    codes = torch.empty(weights.shape, dtype=torch.uint8, device=weights.device) if coded else None
    step = torch.empty_like(scales)
    diagonal = within.diagonal().tolist()
    for j in range(size):
        now = torch.addmv(weights[j], errors[:j].t(), within[:j, j], alpha=-1.0) if j else weights[j]
        y = now * inverse
        if codes is not None:
            codes[j] = e2m1.codes_of(y)
        rounded = e2m1.round_(y, step).mul_(scales)
        torch.sub(now, rounded, out=errors[j])
        errors[j].div_(diagonal[j])
    return codes, errors
