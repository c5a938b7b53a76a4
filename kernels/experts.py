"""Products with stacks of packed weights, one matrix per expert, as operations of a graph.

    nvfp4_dequantize_experts(codes, block_scales, global_scale, columns, dtype, layout, which)   -> w [E, N, K]
    nvfp4_experts_mm(x, codes, block_scales, global_scale, which, rows, layout)                  -> [M, N]
    fp8_dequantize_experts(codes, scales, dtype, which), fp8_experts_mm(x, codes, scales, which, rows)
    fp8_dequantize_experts_rounding(codes, scales, input_scale, dtype, which)      the same; who multiplies by it rounds
                                                                                   inputs first (fp8_inputs.py)
    nvfp4_experts_mm_grad(grad, ..., which, rows, columns, layout), fp8_experts_mm_grad(...)     -> x's gradient, [M, K]

The product's rows: "grouped", sorted by expert, ``which`` int [E] says where each expert's rows end (rows after the
last end are zeros); "gathered", ``which`` int [M] is the expert of each row. Dequantizing with a ``which`` of any shape
gives those matrices alone, [*which.shape, N, K].

codes: NVFP4 uint8 [E, N, K'/2], FP8 e4m3 [E, N, K]; block_scales: e4m3 [E, N, K'/16]; global_scale: fp32 [E]; scales:
fp32 [E, N]. ``passes/joint/multiply_packed.py`` makes products of what modules write as dequantize and multiply.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from . import fp8_weight
from .define_op import define
from .nvfp4 import ops as nvfp4
from .nvfp4.weight import dequantize
from .operands import check_value

ROWS = ("grouped", "gathered")


def _nvfp4_dequantize(
    codes: Tensor,
    block_scales: Tensor,
    global_scale: Tensor,
    columns: int,
    dtype: torch.dtype,
    layout: str,
    which: Tensor | None = None,
) -> Tensor:
    def one(expert: int) -> Tensor:
        parts = nvfp4.to_standard(codes[expert], block_scales[expert], layout)
        return dequantize(*parts, global_scale[expert], columns, dtype)

    return _stacked(one, codes, columns, dtype, which)


def _fp8_dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype, which: Tensor | None = None) -> Tensor:
    def one(expert: int) -> Tensor:
        return fp8_weight.dequantize(codes[expert], scales[expert], dtype)

    return _stacked(one, codes, codes.shape[2], dtype, which)


def _stacked(
    one: Callable[[int], Tensor], codes: Tensor, columns: int, dtype: torch.dtype, which: Tensor | None
) -> Tensor:
    """Each expert that is asked for is dequantized once."""
    if which is None:
        out = codes.new_empty((*codes.shape[:2], columns), dtype=dtype)
        for expert in range(codes.shape[0]):
            out[expert] = one(expert)
        return out
    out = codes.new_empty((which.numel(), codes.shape[1], columns), dtype=dtype)
    wanted: dict[int, list[int]] = {}
    for place, expert in enumerate(which.reshape(-1).tolist()):
        wanted.setdefault(expert, []).append(place)
    for expert, places in wanted.items():
        out[places] = one(expert)
    return out.view(*which.shape, *out.shape[1:])


def nvfp4_mm(
    x: Tensor, codes: Tensor, block_scales: Tensor, global_scale: Tensor, which: Tensor, rows: str, layout: str
) -> Tensor:
    """``nvfp4_experts_mm`` in plain PyTorch."""
    check_value("nvfp4_experts_mm", "layout", layout, nvfp4.LAYOUTS)
    check_value("nvfp4_experts_mm", "rows", rows, ROWS)
    stack = codes, block_scales, global_scale, x.shape[1], x.dtype, layout
    return reference(x, lambda expert: _nvfp4_dequantize(*stack, expert), codes.shape[:2], which, rows)


def fp8_mm(x: Tensor, codes: Tensor, scales: Tensor, which: Tensor, rows: str) -> Tensor:
    """``fp8_experts_mm`` in plain PyTorch."""
    check_value("fp8_experts_mm", "rows", rows, ROWS)
    return reference(x, lambda e: _fp8_dequantize(codes, scales, x.dtype, e), codes.shape[:2], which, rows)


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
    """``nvfp4_experts_mm_grad`` in plain PyTorch."""
    check_value("nvfp4_experts_mm_grad", "layout", layout, nvfp4.LAYOUTS)
    check_value("nvfp4_experts_mm_grad", "rows", rows, ROWS)
    stack = codes, block_scales, global_scale, columns, grad.dtype, layout
    sizes = codes.shape[0], columns
    return reference(grad, lambda expert: _nvfp4_dequantize(*stack, expert).t(), sizes, which, rows)


def fp8_mm_grad(grad: Tensor, codes: Tensor, scales: Tensor, which: Tensor, rows: str) -> Tensor:
    """``fp8_experts_mm_grad`` in plain PyTorch."""
    check_value("fp8_experts_mm_grad", "rows", rows, ROWS)
    sizes = codes.shape[0], codes.shape[2]
    return reference(grad, lambda e: _fp8_dequantize(codes, scales, grad.dtype, e).t(), sizes, which, rows)


def reference(
    x: Tensor, weight: Callable[[Tensor], Tensor], sizes: tuple[int, ...], which: Tensor, rows: str
) -> Tensor:
    """The products in plain PyTorch; ``weight(expert)`` is an expert's matrix, ``sizes`` are (E, N)."""
    y = x.new_zeros((x.shape[0], sizes[1]))
    if rows == "gathered":
        for expert in which.unique():
            mine = which == expert
            y[mine] = x[mine] @ weight(expert).t()
        return y
    start = 0
    for expert, end in enumerate(which.tolist()):
        if end > start:
            y[start:end] = x[start:end] @ weight(torch.tensor(expert)).t()
        start = end
    return y


def _dequantized_like(codes: Tensor, columns: int, dtype: torch.dtype, which: Tensor | None) -> Tensor:
    front = codes.shape[:1] if which is None else which.shape
    return codes.new_empty((*front, codes.shape[1], columns), dtype=dtype)


nvfp4_dequantize_op = define(
    "nvfp4_dequantize_experts(Tensor codes, Tensor block_scales, Tensor global_scale, int columns, ScalarType dtype,"
    " str layout, Tensor? which=None) -> Tensor",
    _nvfp4_dequantize,
    lambda codes, block_scales, global_scale, columns, dtype, layout, which=None: _dequantized_like(
        codes, columns, dtype, which
    ),
)
nvfp4_mm_op = define(
    "nvfp4_experts_mm(Tensor x, Tensor codes, Tensor block_scales, Tensor global_scale, Tensor which, str rows,"
    " str layout) -> Tensor",
    nvfp4_mm,
    lambda x, codes, block_scales, global_scale, which, rows, layout: x.new_empty((x.shape[0], codes.shape[1])),
    cpu="fp8_compile.kernels.cpu.experts:nvfp4_mm",
)
fp8_dequantize_op = define(
    "fp8_dequantize_experts(Tensor codes, Tensor scales, ScalarType dtype, Tensor? which=None) -> Tensor",
    _fp8_dequantize,
    lambda codes, scales, dtype, which=None: _dequantized_like(codes, codes.shape[2], dtype, which),
)
fp8_dequantize_rounding_op = define(
    "fp8_dequantize_experts_rounding(Tensor codes, Tensor scales, Tensor? input_scale, ScalarType dtype,"
    " Tensor? which=None) -> Tensor",
    lambda codes, scales, input_scale, dtype, which=None: _fp8_dequantize(codes, scales, dtype, which),
    lambda codes, scales, input_scale, dtype, which=None: _dequantized_like(codes, codes.shape[2], dtype, which),
)
fp8_mm_op = define(
    "fp8_experts_mm(Tensor x, Tensor codes, Tensor scales, Tensor which, str rows) -> Tensor",
    fp8_mm,
    lambda x, codes, scales, which, rows: x.new_empty((x.shape[0], codes.shape[1])),
    cpu="fp8_compile.kernels.cpu.experts:fp8_mm",
)
nvfp4_mm_grad_op = define(
    "nvfp4_experts_mm_grad(Tensor grad, Tensor codes, Tensor block_scales, Tensor global_scale, Tensor which,"
    " str rows, int columns, str layout) -> Tensor",
    nvfp4_mm_grad,
    lambda grad, codes, block_scales, global_scale, which, rows, columns, layout: grad.new_empty(
        (grad.shape[0], columns)
    ),
    cpu="fp8_compile.kernels.cpu.experts:nvfp4_mm_grad",
)
fp8_mm_grad_op = define(
    "fp8_experts_mm_grad(Tensor grad, Tensor codes, Tensor scales, Tensor which, str rows) -> Tensor",
    fp8_mm_grad,
    lambda grad, codes, scales, which, rows: grad.new_empty((grad.shape[0], codes.shape[2])),
    cpu="fp8_compile.kernels.cpu.experts:fp8_mm_grad",
)
