"""ADMM: alternate between the weights that the output wants and the weights that NVFP4 has.

    minimise (w - z)^T H (w - z)   with z in NVFP4
    x = (H + rho I)^-1 (H w + rho (z - u));   z = nearest NVFP4 to x + u under the block's scales;   u += x - z

Every few rounds the scales are swept again for ``x + u``. The problem isn't convex, so an iterate may be worse than the
one before: each row keeps the best it has had, the start (``hessian``) among them.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from tqdm import tqdm

from . import hessian as hessian_sweep
from . import sweep
from .curvature import mean_energy
from .weight import dequantize, encode


@dataclasses.dataclass(frozen=True)
class Options:
    """``rho``: how hard x is pulled towards z, in units of the Hessian's mean diagonal, growing to ``last_rho``."""

    rounds: int = 40
    rho: float = 0.02
    last_rho: float = 1.0
    sweep_every: int = 10


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
    rows, columns = w.shape
    codes, block_scales = hessian_sweep.quantize(w, global_scale, hessian, block_size)
    target, curvature = w.to(torch.float32) / global_scale, hessian.to(torch.float32)
    one = torch.ones((), device=w.device)

    def decoded(codes: Tensor, block_scales: Tensor) -> Tensor:
        return dequantize(codes, block_scales, one, columns)

    def cost(z: Tensor) -> Tensor:
        error = z - target
        return ((error @ curvature) * error).sum(1)

    zeros = ~sweep.blocks_of(w, block_size).any(2)  # blocks of zeros stay so
    z, u = decoded(codes, block_scales), torch.zeros_like(target)
    best, scales = cost(z), block_scales
    wanted = target @ curvature
    eigenvalues, vectors = torch.linalg.eigh(curvature)
    growth = (options.last_rho / options.rho) ** (1 / max(options.rounds - 1, 1))
    rho = float(options.rho * mean_energy(curvature))
    for number in tqdm(range(options.rounds), desc="admm", disable=not progress, leave=False):
        x = ((wanted + rho * (z - u)) @ vectors) / (eigenvalues.clamp(min=0) + rho) @ vectors.t()
        pulled = x + u
        if number % options.sweep_every == options.sweep_every - 1:
            packed, scales = sweep.quantize(pulled, one, block_size)
        else:
            packed = encode(sweep.blocks_of(pulled, block_size), scales, one)
        packed.view(rows, zeros.shape[1], -1)[zeros] = 0
        z = decoded(packed, scales)
        u = u + x - z
        u, rho = u / growth, rho * growth
        now = cost(z)
        better = now < best
        best = torch.where(better, now, best)
        codes[better] = packed[better]
        block_scales.view(torch.uint8)[better] = scales.view(torch.uint8)[better]
    return codes, block_scales
