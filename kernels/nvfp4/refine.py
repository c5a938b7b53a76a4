"""Coordinate descent on codes: each weight in turn takes the value that is best given all others. Scales stay.

    minimise (q - w)^T H (q - w):     q_j <- nearest( q_j - (H (q - w))_j / H_jj )

No step raises the error, so what comes out is never worse than what went in, under the H that is given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import e2m1


def refine(weights: Tensor, values: Tensor, scales: Tensor, inverse: Tensor, hessian: Tensor, passes: int) -> Tensor:
    """weights, values: [K, N], columns of the matrix as rows; scales and their inverse: [K/B, N], an inverse of 0 keeps
    a block at zero; hessian: [K, K], its diagonal above 0. All in units of the global scale -> codes [K, N]."""
    values = values.clone()
    size = len(weights) // len(scales)
    gradient = hessian @ (values - weights)
    diagonal = hessian.diagonal().tolist()
    step = torch.empty_like(values[0])
    for _ in range(passes):
        for block, scale in enumerate(scales):
            here = slice(block * size, (block + 1) * size)
            within, local = hessian[here, here], gradient[here].clone()
            change = torch.empty_like(local)
            for j in range(size):
                now = values[block * size + j]
                wanted = torch.sub(now, local[j], alpha=1.0 / diagonal[block * size + j]).mul_(inverse[block])
                torch.sub(e2m1.round_(wanted, step).mul_(scale), now, out=change[j])
                local[j + 1 :].addmm_(within[j + 1 :, j : j + 1], change[j : j + 1])
            values[here] += change
            gradient.addmm_(hessian[:, here], change)
    return e2m1.codes_of(values / scales.repeat_interleave(size, 0))
