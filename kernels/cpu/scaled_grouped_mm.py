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
from fp8_compile.kernels.define_op import define, filled
from fp8_compile.kernels.operands import ANY, FP32, INDICES, check, check_value

from .arguments import DTYPES, FORMATS, stride_of
from .library import library

ROWS, CONTRACTION = 0, 1  # scaled_mm.cpp: what the groups divide


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
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    out_dtype: torch.dtype,
    out: Tensor,
) -> None:
    kernels = library()
    if kernels is None:
        out.copy_(reference.scaled_grouped_mm(left, right, offsets, scale_left, scale_right, out_dtype))
        return
    along = ROWS if right.dim() == 3 else CONTRACTION
    tokens = left.shape[along]
    ends = torch.tensor([end for _, end in reference.bounds(offsets, tokens=tokens)], dtype=torch.int64)
    if along == ROWS:
        out[ends[-1] if len(ends) else 0 :].zero_()
    kernels.fp8_scaled_grouped_mm(
        *(along, len(ends), ends.data_ptr(), left.shape[0], right.shape[-1], left.shape[1]),
        *(left.data_ptr(), *left.stride(), FORMATS[left.dtype]),
        *(scale_left.data_ptr(), stride_of(scale_left, 0)),
        *(right.data_ptr(), stride_of(right, -3), right.stride(-1), right.stride(-2), FORMATS[right.dtype]),
        *(scale_right.data_ptr(), stride_of(scale_right, -3), stride_of(scale_right, -1)),
        *(out.data_ptr(), DTYPES[out.dtype], stride_of(out, -3), out.stride(-2), torch.get_num_threads()),
    )


scaled_grouped_mm_op = define(
    "scaled_grouped_mm(Tensor left, Tensor right, Tensor offsets, Tensor scale_left, Tensor scale_right,"
    " ScalarType out_dtype) -> Tensor",
    reference.scaled_grouped_mm,
    _new,
    cpu=filled(_check, _new, _scaled_grouped_mm),
)
