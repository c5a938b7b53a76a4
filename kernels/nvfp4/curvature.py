"""What the methods with a Hessian take from it: filled up to whole blocks, damped, ordered, factored.

    damped(H)         = H + damping * mean(diag H) * I
    inverse_factor(H) = U, upper triangular, U^T U = H^-1

A column that no input ever reached has zeros in H: damping gives it a curvature of its own, and it is rounded to
nearest. The same holds for the columns that fill up the last block, and for a layer that only saw zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDERS = ("pivot", "energy", "natural")
HALVED = 512  # wider triangular matrices are inverted by halves
PIVOTS = 16  # blocks that are chosen between two updates of all that are left


def filled(hessian: Tensor, blocks: Tensor) -> Tensor:
    """[K, K] -> FP32 [K', K']: nothing flows into the columns that fill up the last block. blocks: [N, K'/B, B]."""
    missing = blocks.shape[1] * blocks.shape[2] - hessian.shape[0]
    return torch.nn.functional.pad(hessian.to(torch.float32), (0, missing, 0, missing))


def mean_energy(hessian: Tensor) -> Tensor:
    """``mean(diag H)``, the unit of damping; 1 for a layer that only saw zeros."""
    mean = hessian.diagonal().mean()
    return torch.where(mean > 0, mean, 1.0)


def damped(hessian: Tensor, damping: float) -> Tensor:
    """``H + damping * mean(diag H) * I``."""
    return hessian + damping * mean_energy(hessian) * torch.eye(len(hessian), device=hessian.device)


def factored(hessian: Tensor, count: int, damping: float, order: str) -> tuple[Tensor, Tensor, Tensor]:
    """The order of columns, and in that order the damped Hessian and U; with ten times the damping, and again, where
    rounding left it not positive definite."""
    for attempt in range(6):
        candidate = damped(hessian, damping * 10.0**attempt)
        try:
            columns = column_order(candidate, count, order)
            candidate = candidate[columns][:, columns]
            return columns, candidate, inverse_factor(candidate)
        except torch.linalg.LinAlgError:
            continue
    raise ValueError("gptq: the Hessian is not positive semidefinite; calibrate on more tokens or raise damping")


def inverse_factor(hessian: Tensor) -> Tensor:
    """U with ``U^T U = H^-1``, of a positive definite H."""
    # Reversed, the lower Cholesky factor of H is an upper one; its inverse is the factor of H's inverse.
    factor = torch.linalg.cholesky(hessian.double().flip(0, 1))
    return _inverse(factor).flip(0, 1).to(torch.float32)


def _inverse(lower: Tensor) -> Tensor:
    """Of a lower triangular matrix, by halves: products of matrices are faster than solving for an identity."""
    if len(lower) <= HALVED:
        identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, identity, upper=False)
    half = len(lower) // 2
    first, last = _inverse(lower[:half, :half]), _inverse(lower[half:, half:])
    found = torch.zeros_like(lower)
    found[:half, :half], found[half:, half:] = first, last
    found[half:, :half] = -(last @ (lower[half:, :half] @ first))
    return found


def column_order(hessian: Tensor, count: int, order: str) -> Tensor:
    """Which column is rounded when, blocks of a row together.

    ``energy``: blocks by the trace of their part of H, largest first, and the columns of a block by theirs.
    ``pivot``: from the end: last comes the block of the least energy, before it the one of the least energy that is
    left when the last one makes up for it, and so on. What is left is what rounding that block will cost.
    """
    energy = hessian.diagonal().view(count, -1)
    size = energy.shape[1]
    columns = torch.arange(energy.numel(), device=hessian.device).view(count, size)
    if order == "natural":
        return columns.flatten()
    if order == "energy":
        within = columns.gather(1, energy.argsort(1, descending=True))
        return within[energy.sum(1).argsort(descending=True)].flatten()
    # A Cholesky factorization with blocks as pivots. ``hessian`` is what is left of the blocks in ``columns``, their
    # Schur complement, as it was before the last few pivots; ``half`` has the rows of the factor that these have found.
    left, found = energy.sum(1), []
    while len(columns):
        half = hessian.new_empty(min(PIVOTS, len(columns)) * size, len(hessian))
        for done in range(0, len(half), size):
            at = int(left.argmin())
            here = slice(at * size, (at + 1) * size)
            beside = torch.addmm(hessian[here], half[:done, here].t(), half[:done], alpha=-1.0)
            within = beside[:, here]
            found.append(columns[at][_pivots(within)])
            factor = torch.linalg.cholesky(within.double())
            added = torch.linalg.solve_triangular(factor, beside.double(), upper=False).to(half.dtype)
            half[done : done + size] = added
            left -= added.square().sum(0).view(-1, size).sum(1)
            left[at] = torch.inf
        rest = left.isfinite()
        columns, left, lines = columns[rest], left[rest], rest.repeat_interleave(size)
        half = half[:, lines]
        hessian = hessian[lines][:, lines].addmm_(half.t(), half, alpha=-1.0)
    return torch.cat([part.flip(0) for part in reversed(found)])


def _pivots(block: Tensor) -> Tensor:
    """The columns of a block, from the one of the least energy on, each given those before it."""
    rest = block.double().clone()
    found: list[int] = []
    for _ in range(len(block)):
        energy = rest.diagonal().clone()
        energy[found] = torch.inf
        at = int(energy.argmin())
        found.append(at)
        rest -= torch.outer(rest[:, at], rest[at]) / rest[at, at]
    return torch.tensor(found, device=block.device)
