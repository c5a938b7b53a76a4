"""The FP8 gemm in C++ (``scaled_mm.cpp``), as an operation of a graph.

    y = scaled_mm(left, right, scale_left, scale_right, bias, out_dtype)      kernels/scaled_mm.py: the formula

left: [M, K] fp8, right: [K, N] fp8, E4M3 or E5M2 each, of any strides: no transposed copies are made for it. Only FP32
sums round; they do so the same way whatever the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels import scaled_mm as reference
from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, check, check_value
from fp8_compile.kernels.scaled_mm import SCALE_TILE

from .arguments import DTYPES, FORMATS, GEMM_LEAST_PARALLEL, stride_of, threads_for
from .library import library


def _check(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    op: str = "scaled_mm",
) -> None:
    check(op, "left", left, FORMATS, (ANY, ANY))
    m, k = left.shape
    check(op, "right", right, FORMATS, (k, ANY))
    n, blocks = right.shape[1], -(-k // SCALE_TILE)
    check(op, "scale_left", scale_left, FP32, (1, 1), (m, 1), (m, blocks), (-(-m // SCALE_TILE), blocks))
    check(op, "scale_right", scale_right, FP32, (1, 1), (1, n), (blocks, n), (blocks, -(-n // SCALE_TILE)))
    if bias is not None:
        check(op, "bias", bias, FLOATS, (n,))
    check_value(op, "out_dtype", out_dtype, DTYPES)


def _new(
    left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=out_dtype)


def _scaled_mm(
    left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    _check(left, right, scale_left, scale_right, bias, out_dtype)
    return reference.scaled_mm(left, right, scale_left, scale_right, bias, out_dtype)


def scaled_mm_add_(
    out: Tensor, left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``out += scaled_mm(...)``; the rows of ``out`` [M, N] are contiguous."""
    _check(left, right, scale_left, scale_right, bias, out.dtype, "scaled_mm_add_")
    check("scaled_mm_add_", "out", out, DTYPES, (left.shape[0], right.shape[1]))
    if out.shape[1] > 1 and out.stride(1) != 1:
        raise RuntimeError(f"scaled_mm_add_ expects rows that are contiguous, got strides {out.stride()}")
    kernels = library()
    if kernels is None:
        return out.add_(reference.scaled_mm(left, right, scale_left, scale_right, bias, torch.float32))
    (m, k), n = left.shape, right.shape[1]
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    kernels.fp8_scaled_mm(
        *(m, n, k, left.data_ptr(), *left.stride(), FORMATS[left.dtype]),
        *(scale_left.data_ptr(), stride_of(scale_left, 0), stride_of(scale_left, 1), _lines(scale_left.shape[0], m)),
        *(right.data_ptr(), right.stride(1), right.stride(0), FORMATS[right.dtype]),
        *(scale_right.data_ptr(), stride_of(scale_right, 1), stride_of(scale_right, 0)),
        _lines(scale_right.shape[1], n),
        *(None if bias is None else bias.data_ptr(), out.data_ptr(), DTYPES[out.dtype], out.stride(0), True),
        threads_for(m * n * k, GEMM_LEAST_PARALLEL),
    )
    return out


def _lines(scales: int, size: int) -> int:
    """How many rows or columns share a scale."""
    return 1 if scales in (1, size) else SCALE_TILE


scaled_mm_op = define(
    "scaled_mm(Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
    reference.scaled_mm,
    _new,
    cpu=_scaled_mm,
)
