"""Scales and casts to FP8 in C++, as operations of a graph.

    scales(x)                   -> quant_scale, dequant_scale     kernels/quantize.py, first half
    cast(x, scale)              -> q: fp8                         second half
    quantize_delayed(x, scale)  -> q and the amax in one read     kernels/delayed_scaling.py

Inductor generates code for the model alone, and compiles about as fast as without us. Blocks are the whole tensor, rows
or columns; tiles are left to Inductor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels import delayed_scaling as delayed_reference
from fp8_compile.kernels import quantize as reference
from fp8_compile.kernels.define_op import define, filled
from fp8_compile.kernels.formats import BY_DTYPE, E5M2, format_of
from fp8_compile.kernels.operands import ANY, FP32, ONE, check, check_value
from fp8_compile.kernels.quantize import AMAX_FLOOR, WHOLE

from .arguments import CAST_LEAST_PARALLEL, DTYPES, FORMATS, threads_for
from .library import library

_AXES = {(WHOLE, WHOLE): 0, (1, WHOLE): 1, (WHOLE, 1): 2}  # by block; fp8_cast.cpp: Axis


def _check_scales(x: Tensor, dtype: torch.dtype, block: list[int], op: str = "scales") -> None:
    check(op, "x", x, DTYPES, (ANY, ANY))
    check_value(op, "dtype", dtype, FORMATS)
    check_value(op, "block", tuple(block), _AXES)


def _check_cast(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, block: list[int]) -> None:
    _check_scales(x, dtype, block, "cast")
    rows, cols = (1 if extent == WHOLE else size for size, extent in zip(x.shape, block))
    check("cast", "quant_scale", quant_scale, FP32, (rows, cols))


def _check_delayed(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, wanted: bool) -> None:
    check("quantize_delayed", "x", x, DTYPES)
    check("quantize_delayed", "quant_scale", quant_scale, FP32, *ONE)
    check_value("quantize_delayed", "dtype", dtype, FORMATS)


def _new_scales(x: Tensor, dtype: torch.dtype, block: list[int]) -> tuple[Tensor, Tensor]:
    shape = [1 if extent == WHOLE else size for size, extent in zip(x.shape, block)]
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def _scales(x: Tensor, dtype: torch.dtype, block: list[int], quant_scale: Tensor, dequant_scale: Tensor) -> None:
    kernels = library()
    if kernels is None:
        for result, made in zip((quant_scale, dequant_scale), reference.scales(x, dtype, block)):
            result.copy_(made)
        return
    x, (rows, cols) = x.contiguous(), x.shape
    amax = torch.empty_like(quant_scale)
    kernels.fp8_amax(x.data_ptr(), DTYPES[x.dtype], rows, cols, _axis(block), amax.data_ptr(), _threads(x))
    amax.clamp_(min=AMAX_FLOOR)
    torch.reciprocal(amax, out=quant_scale).mul_(BY_DTYPE[dtype].max)
    torch.reciprocal(quant_scale, out=dequant_scale).add_(amax.mul_(0.0))


def _new_codes(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, block: list[int]) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _cast(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, block: list[int], codes: Tensor) -> None:
    kernels = library()
    if kernels is None:
        codes.copy_(reference.cast(x, quant_scale, dtype, block))
        return
    x, quant_scale = x.contiguous(), quant_scale.contiguous()
    kernels.fp8_quantize(
        *(x.data_ptr(), DTYPES[x.dtype], *x.shape, _axis(block), quant_scale.data_ptr()),
        *(dtype == E5M2.dtype, codes.data_ptr(), _threads(x)),
    )


def _new_delayed(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    used_scale, dequant_scale, amax = (x.new_empty((1, 1), dtype=torch.float32) for _ in range(3))
    return x.new_empty(x.shape if wanted else (0,), dtype=dtype), used_scale, dequant_scale, amax


def _delayed(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The formula in plain PyTorch."""
    amax = reference.block_amax(x.reshape(1, -1), (WHOLE, WHOLE))
    used_scale = delayed_reference.first_scale(quant_scale.reshape(1, 1), amax, format_of(dtype).max)
    codes = delayed_reference.cast_delayed(x, used_scale.reshape(()), dtype) if wanted else x.new_empty(0, dtype=dtype)
    return codes, used_scale, used_scale.reciprocal(), amax


def _quantize_delayed(
    x: Tensor,
    quant_scale: Tensor,
    dtype: torch.dtype,
    wanted: bool,
    codes: Tensor,
    used_scale: Tensor,
    dequant_scale: Tensor,
    amax: Tensor,
) -> None:
    kernels = library()
    if kernels is None:
        for result, made in zip((codes, used_scale, dequant_scale, amax), _delayed(x, quant_scale, dtype, wanted)):
            result.copy_(made)
        return
    x = x.contiguous()
    used_scale.copy_(quant_scale)
    kernels.fp8_delayed(
        *(x.data_ptr(), DTYPES[x.dtype], x.numel(), dtype == E5M2.dtype, used_scale.data_ptr()),
        *(codes.data_ptr() if wanted else None, amax.data_ptr(), _threads(x)),
    )
    torch.reciprocal(used_scale, out=dequant_scale)


def _axis(block: list[int]) -> int:
    return _AXES[block[0], block[1]]


def _threads(x: Tensor) -> int:
    return threads_for(x.numel(), CAST_LEAST_PARALLEL)


scales_op = define(
    "scales(Tensor x, ScalarType dtype, int[2] block) -> (Tensor quant_scale, Tensor dequant_scale)",
    reference.scales,
    _new_scales,
    cpu=filled(_check_scales, _new_scales, _scales),
)
cast_op = define(
    "cast(Tensor x, Tensor quant_scale, ScalarType dtype, int[2] block) -> Tensor",
    reference.cast,
    _new_codes,
    cpu=filled(_check_cast, _new_codes, _cast),
)
# quant_scale: [1, 1], 0 where there is none yet; wanted: whether codes are, or the amax alone.
quantize_delayed_op = define(
    "quantize_delayed(Tensor x, Tensor quant_scale, ScalarType dtype, bool wanted) -> "
    "(Tensor codes, Tensor used_scale, Tensor dequant_scale, Tensor amax)",
    _delayed,
    _new_delayed,
    cpu=filled(_check_delayed, _new_delayed, _quantize_delayed),
)
