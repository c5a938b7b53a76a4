"""The gemm with a scale per row and per column on GPUs that may not have it, as an operation of a graph.

    y = left @ right * scale_left * scale_right + bias

left: [M, K] row-major, right: [K, N] column-major fp8; scale_left: [M, 1], scale_right: [1, N] fp32; bias: [N] -> y:
[M, N] in ``out_dtype``. On compute capability 12.x such a gemm is said to be refused. From 10.0 on torch runs a CUTLASS
kernel of its own for it, which no heuristic of cuBLASLt knows about, so whether there is one is found out by asking:
the first refusal is warned of, and from then on the codes are multiplied with one scale of 1 for each tensor, and the
product, in FP32, by the scales in a pass of its own, which gives the same numbers.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.scaled_mm import scaled_mm

# What cuBLAS, torch, CUTLASS and the driver say where they have no such kernel.
REFUSALS = ("not_supported", "not supported", "not currently supported", "cutlass", "no kernel image")
_refused: set[int] = set()  # devices


class Operands(NamedTuple):
    """What the operation takes, in the order in which it takes them."""

    left: Tensor
    right: Tensor
    scale_left: Tensor
    scale_right: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype
    fast_accumulation: bool = False


def by_rows(given: Operands) -> Tensor:
    """torch's gemm with many scales; a RuntimeError where the GPU has none."""
    left, right, scale_left, scale_right, bias, dtype, fast = given
    return torch._scaled_mm(left, right, scale_left, scale_right, bias=bias, out_dtype=dtype, use_fast_accum=fast)


def by_one_scale(given: Operands) -> Tensor:
    """The same by a gemm without scales and a pass over its result."""
    left, right, scale_left, scale_right, bias, dtype, fast = given
    one = torch.ones((), device=left.device)
    y = torch._scaled_mm(left, right, one, one, out_dtype=torch.float32, use_fast_accum=fast)
    y = y * scale_left * scale_right
    return (y if bias is None else y + bias).to(dtype)


def multiply(*arguments: Any) -> Tensor:
    """The formula on a GPU."""
    given = Operands(*arguments)
    device = given.left.device.index or 0
    if device not in _refused:
        try:
            return by_rows(given)
        except RuntimeError as error:
            if not any(words in str(error).lower() for words in REFUSALS):
                raise
            _refused.add(device)
            warnings.warn(
                f"cuda:{device}: torch refused an FP8 gemm with a scale per row. From now on products are scaled in "
                f"passes over memory of their own; recipe='mxfp8' has gemms on this GPU. It said: {error}",
                stacklevel=2,
            )
    return by_one_scale(given)


def _reference(*arguments: Any) -> Tensor:
    return scaled_mm(*Operands(*arguments)[:-1])


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
