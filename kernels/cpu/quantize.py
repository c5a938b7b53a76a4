"""Scales and casts to FP8 as operations of a graph (``fp8_cast.cpp``).

    scales(x)                   -> quant_scale, dequant_scale     kernels/quantize.py, first half
    cast(x, scale)              -> q: fp8                         second half
    quantize_delayed(x, scale)  -> q and the amax in one read     kernels/delayed_scaling.py
    whole_scale(x, scale)       -> enc, dequant and the amax      kernels/nvfp4_training.py, global_scale

Inductor generates code for the model alone, and compiles about as fast as without us. Blocks are the whole tensor, rows
or columns; tiles are left to Inductor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels import delayed_scaling as delayed_reference
from fp8_compile.kernels import quantize as reference
from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.formats import format_of
from fp8_compile.kernels.operands import ANY, FP32, ONE, check, check_value
from fp8_compile.kernels.quantize import WHOLE

from .arguments import DTYPES, FORMATS

_BLOCKS = ((WHOLE, WHOLE), (1, WHOLE), (WHOLE, 1))  # operations.cpp: check_block


def _check(op: str, x: Tensor, dtype: torch.dtype, block: list[int]) -> None:
    check(op, "x", x, DTYPES, (ANY, ANY))
    check_value(op, "dtype", dtype, FORMATS)
    check_value(op, "block", tuple(block), _BLOCKS)


def _sizes(x: Tensor, block: list[int]) -> tuple[int, int]:
    """Of the scales."""
    rows, cols = (1 if extent == WHOLE else size for size, extent in zip(x.shape, block))
    return rows, cols


def _scales(x: Tensor, dtype: torch.dtype, block: list[int]) -> tuple[Tensor, Tensor]:
    _check("scales", x, dtype, block)
    return reference.scales(x, dtype, block)


def _new_scales(x: Tensor, dtype: torch.dtype, block: list[int]) -> tuple[Tensor, Tensor]:
    shape = _sizes(x, block)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def _cast(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, block: list[int]) -> Tensor:
    _check("cast", x, dtype, block)
    check("cast", "quant_scale", quant_scale, FP32, _sizes(x, block))
    return reference.cast(x, quant_scale, dtype, block)


def _new_codes(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, block: list[int]) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _checked_delayed(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check("quantize_delayed", "x", x, DTYPES)
    check("quantize_delayed", "quant_scale", quant_scale, FP32, *ONE)
    check_value("quantize_delayed", "dtype", dtype, FORMATS)
    return quantize_delayed(x, quant_scale, dtype, wanted)


def quantize_delayed(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The formula in plain PyTorch."""
    amax = reference.block_amax(x.reshape(1, -1), (WHOLE, WHOLE))
    used_scale = delayed_reference.first_scale(quant_scale.reshape(1, 1), amax, format_of(dtype).max)
    codes = delayed_reference.cast_delayed(x, used_scale.reshape(()), dtype) if wanted else x.new_empty(0, dtype=dtype)
    return codes, used_scale, used_scale.reciprocal(), amax


def _new_delayed(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, wanted: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    used_scale, dequant_scale, amax = (x.new_empty((1, 1), dtype=torch.float32) for _ in range(3))
    return x.new_empty(x.shape if wanted else (0,), dtype=dtype), used_scale, dequant_scale, amax


def _checked_whole(x: Tensor, known: Tensor | None, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    check("whole_scale", "x", x, DTYPES)
    if known is not None:
        check("whole_scale", "known", known, FP32, *ONE)
    return whole_scale(x, known, largest)


def whole_scale(x: Tensor, known: Tensor | None, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """The formula in plain PyTorch."""
    amax = reference.block_amax(x.reshape(1, -1), (WHOLE, WHOLE))
    first = torch.zeros_like(amax) if known is None else known.reshape(1, 1)
    scale = delayed_reference.first_scale(first, amax, largest)
    return scale, scale.reciprocal(), amax


def _new_whole(x: Tensor, known: Tensor | None, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    scale, inverse, amax = (x.new_empty((1, 1), dtype=torch.float32) for _ in range(3))
    return scale, inverse, amax


scales_op = define(
    "scales(Tensor x, ScalarType dtype, int[2] block) -> (Tensor quant_scale, Tensor dequant_scale)",
    reference.scales,
    _new_scales,
    cpu=_scales,
)
cast_op = define(
    "cast(Tensor x, Tensor quant_scale, ScalarType dtype, int[2] block) -> Tensor",
    reference.cast,
    _new_codes,
    cpu=_cast,
)
# quant_scale: [1, 1], 0 where there is none yet; wanted: whether codes are, or the amax alone.
quantize_delayed_op = define(
    "quantize_delayed(Tensor x, Tensor quant_scale, ScalarType dtype, bool wanted) -> "
    "(Tensor codes, Tensor used_scale, Tensor dequant_scale, Tensor amax)",
    quantize_delayed,
    _new_delayed,
    cpu=_checked_delayed,
)
# The scale of a tensor whose blocks have scales, too. known: [1, 1], 0 where there is none yet; None: always x's own.
whole_scale_op = define(
    "whole_scale(Tensor x, Tensor? known, float largest) -> (Tensor scale, Tensor inverse, Tensor amax)",
    whole_scale,
    _new_whole,
    cpu=_checked_whole,
)
