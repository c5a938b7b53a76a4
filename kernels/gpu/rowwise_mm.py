"""The gemm with a scale per row and per column on GPUs that may not have it, as an operation of a graph.

    y = left @ right * scale_left * scale_right + bias

left: [M, K] row-major, right: [K, N] column-major fp8; scale_left: [M, 1], scale_right: [1, N] fp32; bias: [N] -> y:
[M, N] in ``out_dtype``. On compute capability 12.x cuBLAS is said to answer such a gemm with NOT_SUPPORTED. Whether it
does is found out by asking: the first refusal is warned of, and from then on the codes are multiplied with one scale of
1 for each tensor, and the product, in FP32, by the scales in a pass of its own, which gives the same numbers.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.scaled_mm import scaled_mm

_refused: set[int] = set()  # devices


def by_rows(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """torch's gemm with many scales; a RuntimeError where the GPU has none."""
    options: dict[str, Any] = {"out_dtype": out_dtype, "use_fast_accum": fast_accumulation}
    return torch._scaled_mm(left, right, scale_left, scale_right, bias=bias, **options)


def by_one_scale(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool,
) -> Tensor:
    """The same by a gemm without scales and a pass over its result."""
    one = torch.ones((), device=left.device)
    y = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32, use_fast_accum=fast_accumulation)
    y = y * scale_left * scale_right
    return (y if bias is None else y + bias).to(out_dtype)


def multiply(left: Tensor, right: Tensor, *others: Any) -> Tensor:
    """The formula on a GPU."""
    others = (*others, False) if len(others) == 4 else others
    device = left.device.index or 0
    if device not in _refused:
        try:
            return by_rows(left, right, *others)
        except RuntimeError as error:
            if "NOT_SUPPORTED" not in str(error) and "not supported" not in str(error).lower():
                raise
            _refused.add(device)
            warnings.warn(
                f"cuda:{device}: cuBLAS refused an FP8 gemm with a scale per row. From now on products are scaled in "
                f"passes over memory of their own; recipe='mxfp8' has gemms on this GPU. It said: {error}",
                stacklevel=2,
            )
    return by_one_scale(left, right, *others)


def _reference(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulation: bool = False,
) -> Tensor:
    return scaled_mm(left, right, scale_left, scale_right, bias, out_dtype)


rowwise_mm_op = define(
    "rowwise_mm(Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor? bias, ScalarType out_dtype, "
    "bool fast_accumulation=False) -> Tensor",
    _reference,
    lambda left, right, scale_left, scale_right, bias, out_dtype, fast_accumulation=False: left.new_empty(
        (left.shape[0], right.shape[1]), dtype=out_dtype
    ),
    cuda=multiply,
)


@register_flop_formula(torch.ops.fp8_compile.rowwise_mm)
def _flops(left: Any, right: Any, *others: Any, out_shape: Any = None, **options: Any) -> int:
    return 2 * left[0] * left[1] * right[1]
