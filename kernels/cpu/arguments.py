"""What the C++ kernels are told with numbers: which dtype, which format, how many threads."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels.formats import E4M3, E5M2

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # fp8_formats.h: Dtype
FORMATS = {E4M3.dtype: 0, E5M2.dtype: 1}  # scaled_mm.cpp: left_e5m2, right_e5m2

# Below so much work, waking threads takes longer than the work itself, and on busy cores much longer. kernels.h
# has the same number, and those of the other kernels.
GEMM_LEAST_PARALLEL = 1 << 20  # multiplications


def threads_for(work: int, least: int) -> int:
    """All of torch's threads, or one for less work than ``least``."""
    return torch.get_num_threads() if work >= least else 1


def stride_of(tensor: Tensor, dim: int) -> int:
    """The distance from one element to the next along a dimension; 0 where there is one for all."""
    has_it = -tensor.dim() <= dim < tensor.dim()
    return tensor.stride(dim) if has_it and tensor.shape[dim] > 1 else 0
