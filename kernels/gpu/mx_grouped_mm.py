"""The MXFP8 gemm of ragged groups on a GPU: torch's, with scales as it wants them (``kernels/mx_grouped_mm.py``)."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels.mx_swizzled import ROWS


def multiply(left: Tensor, right: Tensor, ends: Tensor, scale_left: Tensor, scale_right: Tensor) -> Tensor:
    """A matrix of scales for each matrix of a side: [rows, columns] of all groups, or [groups, bytes] of a stack.

    Scales of E8M0 are made of bytes here and not in the graph, where Inductor can do little with that dtype.
    """
    scales_left = _matrix(scale_left, left.shape[0])
    stacked = right.dim() == 3
    scales_right = scale_right.view(right.shape[0], -1) if stacked else _matrix(scale_right, right.shape[1])
    e8m0_left, e8m0_right = (scale.view(torch.float8_e8m0fnu) for scale in (scales_left, scales_right))
    return torch._scaled_grouped_mm(left, right, e8m0_left, e8m0_right, ends, out_dtype=torch.bfloat16)


def _matrix(flat: Tensor, outer: int) -> Tensor:
    return flat.view(-(-outer // ROWS) * ROWS, -1)
