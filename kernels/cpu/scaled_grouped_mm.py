"""The FP8 gemm of ragged groups in C++ (``scaled_mm.cpp``), as an operation of a graph.

    y = scaled_grouped_mm(left, right, offsets, scale_left, scale_right, out_dtype)

``kernels/scaled_grouped_mm.py`` has the formulas and shapes. Operands are E4M3 or E5M2 each, of any strides. A group is
one gemm, on parts of the operands as they are stored: sizes that change from step to step change no shape, and nothing
is compiled again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels import scaled_grouped_mm as reference
from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.operands import ANY, FP32, INDICES, check, check_value

from .arguments import DTYPES, FORMATS


def _check(
    left: Tensor, right: Tensor, offsets: Tensor, scale_left: Tensor, scale_right: Tensor, out_dtype: torch.dtype
) -> None:
    op = "scaled_grouped_mm"
    check(op, "left", left, FORMATS, (ANY, ANY))
    m, k = left.shape
    check(op, "right", right, FORMATS, (ANY, k, ANY), (k, ANY))
    n = right.shape[-1]
    check(op, "scale_left", scale_left, FP32, (1, 1), (m, 1))
    if right.dim() == 3:
        groups = right.shape[0]
        check(op, "offsets", offsets, INDICES, (groups,))
        check(op, "scale_right", scale_right, FP32, (1, 1), (groups, 1, n), (groups, 1, 1))
    else:
        check(op, "offsets", offsets, INDICES, (ANY,))
        check(op, "scale_right", scale_right, FP32, (1, 1), (1, n))
    check_value(op, "out_dtype", out_dtype, DTYPES)


def _new(
    left: Tensor, right: Tensor, offsets: Tensor, scale_left: Tensor, scale_right: Tensor, out_dtype: torch.dtype
) -> Tensor:
    return reference.new_result(left, right, offsets, out_dtype)


def _scaled_grouped_mm(
    left: Tensor, right: Tensor, offsets: Tensor, scale_left: Tensor, scale_right: Tensor, out_dtype: torch.dtype
) -> Tensor:
    _check(left, right, offsets, scale_left, scale_right, out_dtype)
    return reference.scaled_grouped_mm(left, right, offsets, scale_left, scale_right, out_dtype)


scaled_grouped_mm_op = define(
    "scaled_grouped_mm(Tensor left, Tensor right, Tensor offsets, Tensor scale_left, Tensor scale_right,"
    " ScalarType out_dtype) -> Tensor",
    reference.scaled_grouped_mm,
    _new,
    cpu=_scaled_grouped_mm,
)
