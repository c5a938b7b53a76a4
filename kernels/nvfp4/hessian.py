"""The scale of each block by what its error does to the layer's output.

    s = argmin over all E4M3 numbers of  e^T H_b e,      e = s * e2m1(x / s) - x,      H_b = mean(x_b x_b^T)

H_b is the block's own part of the Hessian of the layer's squared output error; what blocks do to each other is left to
``admm`` and ``gptq``. The bounds of the search hold for this error too: it is at least H_b's smallest eigenvalue times
the squared error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from .curvature import filled
from .scale_search import best_scales
from .sweep import columns_of
from .weight import block_scale_of, blocks_of, encode


def quantize(
    w: Tensor, global_scale: Tensor, hessian: Tensor, block_size: int = 16, progress: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of an [N, K] matrix; hessian: [K, K]."""
    blocks = blocks_of(w, block_size)
    start = block_scale_of(blocks.abs().amax(-1), global_scale)
    block_scales = torch.empty_like(start)
    roots, least = roots_of(filled(hessian, blocks), blocks.shape[1])
    for index in tqdm(range(blocks.shape[1]), desc="hessian", disable=not progress, leave=False):
        x = columns_of(blocks[:, index : index + 1], global_scale)
        root = roots[index]
        scales, _ = best_scales(
            x, start[:, index], lambda error, root=root: (root @ error).square_().sum(0), least[index]
        )
        block_scales[:, index] = scales
    return encode(blocks, block_scales, global_scale), block_scales


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
