"""Products with stacks of packed weights in C++ (``experts.cpp``): what ``kernels/experts.py`` runs on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels import experts as reference
from fp8_compile.kernels.formats import BY_DTYPE
from fp8_compile.kernels.nvfp4.ops import INTERLEAVED, LAYOUTS
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, INDICES, check, check_value

from .arguments import DTYPES
from .library import library
from .nvfp4 import check_weight


def nvfp4_mm(
    x: Tensor, codes: Tensor, block_scales: Tensor, global_scale: Tensor, which: Tensor, rows: str, layout: str
) -> Tensor:
    """x [M, K], codes [E, N, K'/2], block_scales [E, N, K'/16], global_scale fp32 [E] -> [M, N]. There are kernels for
    interleaved weights."""
    op = "nvfp4_experts_mm"
    check_value(op, "layout", layout, LAYOUTS)
    check_value(op, "rows", rows, reference.ROWS)
    if layout != INTERLEAVED:
        return reference.nvfp4_mm(x, codes, block_scales, global_scale, which, rows, layout)
    check(op, "x", x, FLOATS, (ANY, ANY))
    check_weight(op, x, codes, block_scales, (ANY, ANY, ANY))
    check(op, "global_scale", global_scale, FLOATS, codes.shape[:1])
    check(op, "which", which, INDICES, codes.shape[:1] if rows == "grouped" else x.shape[:1])
    kernels = library()
    if kernels is None or x.dtype not in DTYPES:
        return reference.nvfp4_mm(x, codes, block_scales, global_scale, which, rows, layout)
    experts, n, half = codes.shape
    x, y = _operands(x, n)
    codes, block_scales = codes.contiguous(), block_scales.contiguous()
    global_scale, which = global_scale.to(torch.float32).contiguous(), which.to(torch.int64).contiguous()
    failed = kernels.nvfp4_experts(
        *(x.data_ptr(), *x.shape, x.stride(0), DTYPES[x.dtype], codes.data_ptr(), block_scales.data_ptr()),
        *(global_scale.data_ptr(), experts, n, 2 * half, which.data_ptr(), rows == "grouped", y.data_ptr()),
        torch.get_num_threads(),
    )
    return _checked(op, failed, y, experts, which, rows)


def fp8_mm(x: Tensor, codes: Tensor, scales: Tensor, which: Tensor, rows: str) -> Tensor:
    """x [M, K], codes e4m3 [E, N, K], scales fp32 [E, N] -> [M, N]."""
    op = "fp8_experts_mm"
    check_value(op, "rows", rows, reference.ROWS)
    check(op, "x", x, FLOATS, (ANY, ANY))
    check(op, "codes", codes, BY_DTYPE, (ANY, ANY, x.shape[1]))
    check(op, "scales", scales, FP32, codes.shape[:2])
    check(op, "which", which, INDICES, codes.shape[:1] if rows == "grouped" else x.shape[:1])
    kernels = library()
    if kernels is None or x.dtype not in DTYPES:
        return reference.fp8_mm(x, codes, scales, which, rows)
    experts, n, _ = codes.shape
    x, y = _operands(x, n)
    codes, scales, which = codes.contiguous(), scales.contiguous(), which.to(torch.int64).contiguous()
    failed = kernels.fp8_experts(
        *(x.data_ptr(), *x.shape, x.stride(0), DTYPES[x.dtype], codes.data_ptr(), scales.data_ptr()),
        *(experts, n, which.data_ptr(), rows == "grouped", y.data_ptr(), torch.get_num_threads()),
    )
    return _checked(op, failed, y, experts, which, rows)


def _operands(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    return x, x.new_empty((x.shape[0], n))


def _checked(op: str, failed: int, y: Tensor, experts: int, which: Tensor, rows: str) -> Tensor:
    if failed:
        expected = (
            f"ends of {experts} groups, none before the one in front of it or behind row {y.shape[0]}"
            if rows == "grouped"
            else f"experts from 0 to {experts - 1}"
        )
        raise IndexError(
            f"fp8_compile::{op}: which: an index says which expert multiplies a row: expected {expected}, got "
            f"{which.tolist()}"
        )
    return y
