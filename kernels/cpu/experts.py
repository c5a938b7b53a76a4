"""Products with stacks of packed weights on a CPU (``experts.cpp``): what is checked, and the formula without C++."""

from __future__ import annotations

from torch import Tensor

from fp8_compile.kernels import experts as reference
from fp8_compile.kernels.formats import BY_DTYPE
from fp8_compile.kernels.nvfp4.ops import INTERLEAVED, LAYOUTS
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, INDICES, check, check_value

from .nvfp4 import check_grad_weight, check_weight


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
    _check_experts(op, x, which, codes.shape[0], rows)
    return reference.nvfp4_mm(x, codes, block_scales, global_scale, which, rows, layout)


def fp8_mm(x: Tensor, codes: Tensor, scales: Tensor, which: Tensor, rows: str) -> Tensor:
    """x [M, K], codes e4m3 [E, N, K], scales fp32 [E, N] -> [M, N]."""
    op = "fp8_experts_mm"
    check_value(op, "rows", rows, reference.ROWS)
    check(op, "x", x, FLOATS, (ANY, ANY))
    check(op, "codes", codes, BY_DTYPE, (ANY, ANY, x.shape[1]))
    check(op, "scales", scales, FP32, codes.shape[:2])
    check(op, "which", which, INDICES, codes.shape[:1] if rows == "grouped" else x.shape[:1])
    _check_experts(op, x, which, codes.shape[0], rows)
    return reference.fp8_mm(x, codes, scales, which, rows)


def nvfp4_mm_grad(
    grad: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    global_scale: Tensor,
    which: Tensor,
    rows: str,
    columns: int,
    layout: str,
) -> Tensor:
    """grad [M, N], codes [E, N, K'/2], block_scales [E, N, K'/16], global_scale fp32 [E] -> [M, columns]."""
    op = "nvfp4_experts_mm_grad"
    check_value(op, "layout", layout, LAYOUTS)
    check_value(op, "rows", rows, reference.ROWS)
    if layout == INTERLEAVED:
        check(op, "grad", grad, FLOATS, (ANY, ANY))
        check_grad_weight(op, grad, codes, block_scales, columns, (ANY, grad.shape[1], ANY))
        check(op, "global_scale", global_scale, FLOATS, codes.shape[:1])
        check(op, "which", which, INDICES, codes.shape[:1] if rows == "grouped" else grad.shape[:1])
        _check_experts(op, grad, which, codes.shape[0], rows)
    return reference.nvfp4_mm_grad(grad, codes, block_scales, global_scale, which, rows, columns, layout)


def fp8_mm_grad(grad: Tensor, codes: Tensor, scales: Tensor, which: Tensor, rows: str) -> Tensor:
    """grad [M, N], codes e4m3 [E, N, K], scales fp32 [E, N] -> [M, K]."""
    op = "fp8_experts_mm_grad"
    check_value(op, "rows", rows, reference.ROWS)
    check(op, "grad", grad, FLOATS, (ANY, ANY))
    check(op, "codes", codes, BY_DTYPE, (ANY, grad.shape[1], ANY))
    check(op, "scales", scales, FP32, codes.shape[:2])
    check(op, "which", which, INDICES, codes.shape[:1] if rows == "grouped" else grad.shape[:1])
    _check_experts(op, grad, which, codes.shape[0], rows)
    return reference.fp8_mm_grad(grad, codes, scales, which, rows)


def _check_experts(op: str, x: Tensor, which: Tensor, experts: int, rows: str) -> None:
    """Raise an error unless the index names experts, or rows, that are there."""
    named: list[int] = which.tolist()
    if rows == "grouped":
        expected = f"ends of {experts} groups, none before the one in front of it or behind row {x.shape[0]}"
        sound = all(start <= end <= x.shape[0] for start, end in zip([0, *named], named))
    else:
        expected = f"experts from 0 to {experts - 1}"
        sound = all(-experts <= expert < experts for expert in named)  # negative ones count from the end
    if not sound:
        raise RuntimeError(
            f"fp8_compile::{op}: which: an index says which expert multiplies a row: expected {expected}, got {named}"
        )
