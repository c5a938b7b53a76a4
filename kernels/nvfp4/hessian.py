"""The scale of each block by what its error does to the layer's output, codes to nearest.

    minimise e^T H e over the scales of a row,        e = s * e2m1(x / s) - x,      H = mean(x x^T)
    first:  s_b = argmin over all E4M3 numbers of  e_b^T H_b e_b                    H_b: the block's own part of H
    then:   s_b = argmin over all E4M3 numbers of  e_b^T H_b e_b + 2 e_b^T c_b      c_b = (H e)_b - H_b e_b: the others

block after block, until no block of a row has a better scale given those of the others, or for ``PASSES``. No step
raises the error of a row. The bounds of the first search hold for its error: it is at least H_b's smallest eigenvalue
times the squared error. The searches that follow try all scales.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from tqdm import tqdm

from . import e2m1
from .curvature import filled
from .scale_search import best_scales
from .sweep import columns_of
from .weight import SCALE_CODES, SCALE_DTYPE, block_scale_of, blocks_of, chunks, encode

PASSES = 8  # the last of them change one scale in a hundred
MARGIN = 1e-6  # of a row's error, that a change has to win: more than FP32 may be wrong by


def quantize(
    w: Tensor, global_scale: Tensor, hessian: Tensor, block_size: int = 16, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of an [N, K] matrix; hessian: [K, K]."""
    blocks = blocks_of(w, block_size)
    curvature = filled(hessian, blocks)
    block_scales = own_scales(blocks, global_scale, curvature, progress)
    for part in chunks(blocks.shape[0], len(SCALE_CODES) * block_size, 1 << 22):
        block_scales[part] = _descended(blocks[part], block_scales[part], global_scale, curvature)
    return encode(blocks, block_scales, global_scale), block_scales


def own_scales(blocks: Tensor, global_scale: Tensor, hessian: Tensor, progress: bool = False) -> Tensor:
    """Each block by itself. blocks: FP32 [N, C, B], hessian: FP32 [C * B, C * B] -> e4m3 [N, C]."""
    start = block_scale_of(blocks.abs().amax(-1), global_scale)
    block_scales = torch.empty_like(start)
    roots, least = roots_of(hessian, blocks.shape[1])
    for index in tqdm(range(blocks.shape[1]), desc="hessian", disable=not progress, leave=False):
        x = columns_of(blocks[:, index : index + 1], global_scale)
        scales, _ = best_scales(x, start[:, index], functools.partial(_weighted, roots[index]), least[index])
        block_scales[:, index] = scales
    return block_scales


def _weighted(root: Tensor, error: Tensor) -> Tensor:
    """``e^T H e`` of each column, H = root^T root."""
    return (root @ error).square_().sum(0)


def roots_of(hessian: Tensor, count: int) -> tuple[Tensor, list[float]]:
    """R with ``R^T R = H_b`` for every block on the diagonal, [C, B, B], and the smallest eigenvalues."""
    size = hessian.shape[0] // count
    diagonal = hessian.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    eigenvalues, vectors = torch.linalg.eigh(diagonal.double())
    eigenvalues = eigenvalues.clamp(min=0.0)
    roots = eigenvalues.sqrt().unsqueeze(-1) * vectors.transpose(1, 2)
    # Rounding of the matrix may raise its smallest eigenvalue by a little of its largest.
    least = (eigenvalues[:, 0] - 1e-6 * eigenvalues[:, -1]).clamp(min=0.0)
    return roots.to(torch.float32), least.tolist()


def _descended(blocks: Tensor, block_scales: Tensor, global_scale: Tensor, hessian: Tensor) -> Tensor:
    """Each block given the others. blocks: FP32 [N, C, B], block_scales: e4m3 [N, C] -> e4m3 [N, C]."""
    rows, count, size = blocks.shape
    x = columns_of(blocks.view(rows, 1, -1), global_scale)  # [K, N]
    every = torch.tensor(SCALE_CODES, dtype=torch.uint8, device=x.device)
    candidates = every.view(SCALE_DTYPE).to(torch.float32).view(1, -1, 1)
    codes = block_scales.view(torch.uint8).t().contiguous()  # [C, N]
    scales = codes.view(SCALE_DTYPE).to(torch.float32).repeat_interleave(size, 0)
    error = _rounded(x, scales).sub_(x)
    effect = hessian @ error
    y, step = (x.new_empty(size, len(every), rows) for _ in range(2))
    for _ in range(PASSES):
        margin, changed = MARGIN * (error * effect).sum(0), False
        for index in range(count):
            here = slice(index * size, (index + 1) * size)
            within, target, now = hessian[here, here], x[here].unsqueeze(1), error[here]
            own = within @ now
            others = effect[here] - own
            torch.div(target, candidates, out=y)
            e2m1.round_(y, step).mul_(candidates).sub_(target)
            torch.mm(within, y.flatten(1), out=step.flatten(1))
            least, at = step.add_(others.unsqueeze(1), alpha=2.0).mul_(y).sum(0).min(0)
            better = least < (own.add_(others, alpha=2.0) * now).sum(0) - margin
            if not better.any():
                continue
            changed = True
            change = torch.where(better, y.gather(1, at.expand(size, 1, rows)).squeeze(1) - now, 0.0)
            codes[index] = torch.where(better, every[at], codes[index])
            error[here] += change
            effect.addmm_(hessian[:, here], change)
        if not changed:
            break
    return codes.t().contiguous().view(SCALE_DTYPE)


def _rounded(x: Tensor, scales: Tensor) -> Tensor:
    return e2m1.round_(x / scales, torch.empty_like(x)).mul_(scales)
