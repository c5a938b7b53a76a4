"""The CPU kernels as operations of a graph.

    scales(x)          -> quant_scale, dequant_scale     kernels/quantize.py, first half
    cast(x, scale)     -> q: fp8                         second half
    round(x, scale)    -> the same values in FP32, for a gemm in the same graph: no bytes are written and read back
    quantize_delayed(x, scale)  -> both of them and the amax in one read      kernels/delayed_scaling.py
    decode(q)          -> FP32
    scaled_product(a, b, scale_a, scale_b)  -> y         kernels/scaled_mm.py, for operands in FP8 or in FP32 with
                                                         FP8 values; the FP32 gemm is MKL's

To Inductor they are opaque: it generates code for the model alone, and compiles about as fast as without us.
Blocks are the whole tensor, rows or columns; tiles are left to Inductor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8_compile.kernels.formats import BY_DTYPE, E5M2
from fp8_compile.kernels.quantize import AMAX_FLOOR, WHOLE, is_tiled
from fp8_compile.kernels.scaled_mm import epilogue

from . import loop_split
from .library import library

loop_split.install()

LEAST_PARALLEL = 1 << 17  # elements; one thread quantizes as many in some 0.2 ms
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_AXES = {(True, True): 0, (False, True): 1, (True, False): 2}  # by (block[0] == WHOLE, block[1] == WHOLE)


def scales(x: Tensor, dtype: torch.dtype, block: list[int]) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    amax = x.new_empty(_scale_shape(x, block), dtype=torch.float32)
    rows, cols = x.shape
    library().fp8_amax(x.data_ptr(), _DTYPES[x.dtype], rows, cols, _axis(block), amax.data_ptr(), _threads(x))
    amax.clamp_(min=AMAX_FLOOR)
    quant_scale = amax.reciprocal().mul_(BY_DTYPE[dtype].max)
    return quant_scale, quant_scale.reciprocal().add_(amax.mul_(0.0))


def cast(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, block: list[int]) -> Tensor:
    return _quantize(x, quant_scale, dtype, block, torch.empty(x.shape, dtype=dtype))


def round(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, block: list[int]) -> Tensor:
    return _quantize(x, quant_scale, dtype, block, torch.empty(x.shape, dtype=torch.float32))


def quantize_delayed(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, margin: int, rounded: bool, codes: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rounded values, codes (each empty unless wanted), quant_scale as used, dequant_scale, amax."""
    x = x.contiguous()
    as_fp32, as_fp8, used, dequant_scale, amax = _fake_quantize_delayed(x, quant_scale, dtype, margin, rounded, codes)
    used.copy_(quant_scale)
    library().fp8_delayed(
        *(x.data_ptr(), _DTYPES[x.dtype], x.numel(), 2.0**margin, dtype == E5M2.dtype, used.data_ptr()),
        *(as_fp32.data_ptr() if rounded else None, as_fp8.data_ptr() if codes else None),
        *(amax.data_ptr(), _threads(x)),
    )
    torch.reciprocal(used, out=dequant_scale)
    return as_fp32, as_fp8, used, dequant_scale, amax


def _fake_quantize_delayed(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, margin: int, rounded: bool, codes: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    values = x.new_empty(x.shape if rounded else (0,), dtype=torch.float32)
    encoded = x.new_empty(x.shape if codes else (0,), dtype=dtype)
    return values, encoded, *(x.new_empty((1, 1), dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


def decode(q: Tensor) -> Tensor:
    q = q.contiguous()
    out = torch.empty(q.shape, dtype=torch.float32)
    library().fp8_decode(q.data_ptr(), q.dtype == E5M2.dtype, q.numel(), out.data_ptr(), _threads(q))
    return out


def scaled_product(
    left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    a, b = (side if side.dtype == torch.float32 else side.to(torch.float32) for side in (left, right))
    if scale_left.numel() == scale_right.numel() == 1 and out_dtype == torch.float32:
        # One scale for all: the gemm multiplies by it, and adds the bias, at no cost. Not where it is NaN or Inf:
        # MKL takes alpha=NaN for 1 (seen with torch 2.13 on AVX2), which would hide an overflow.
        alpha = float(scale_left * scale_right)
        if math.isfinite(alpha):
            start = bias if bias is not None else a.new_empty(b.shape[1])
            return torch.addmm(start, a, b, beta=int(bias is not None), alpha=alpha)
    return epilogue(a @ b, scale_left, scale_right, bias, out_dtype)


def _quantize(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, block: list[int], out: Tensor) -> Tensor:
    x, quant_scale = x.contiguous(), quant_scale.contiguous()
    library().fp8_quantize(
        x.data_ptr(),
        _DTYPES[x.dtype],
        *x.shape,
        _axis(block),
        quant_scale.data_ptr(),
        dtype == E5M2.dtype,
        out.dtype == torch.float32,
        out.data_ptr(),
        _threads(x),
    )
    return out


def _axis(block: list[int]) -> int:
    assert not is_tiled(block), block
    return _AXES[block[0] == WHOLE, block[1] == WHOLE]


def _scale_shape(x: Tensor, block: list[int]) -> list[int]:
    return [1 if extent == WHOLE else size for size, extent in zip(x.shape, block)]


def _threads(x: Tensor) -> int:
    """Waking threads for less takes longer than the work, and on busy cores much longer."""
    return torch.get_num_threads() if x.numel() >= LEAST_PARALLEL else 1


_library = torch.library.Library("fp8_compile", "FRAGMENT")


def _define(schema: str, function, fake):  # type: ignore[no-untyped-def]
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"fp8_compile::{name}", fake, lib=_library)
    return getattr(torch.ops.fp8_compile, name).default


def _fake_scales(x: Tensor, dtype: torch.dtype, block: list[int]) -> tuple[Tensor, Tensor]:
    shape = _scale_shape(x, block)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


scales_op = _define(
    "scales(Tensor x, ScalarType dtype, int[2] block) -> (Tensor quant_scale, Tensor dequant_scale)",
    scales,
    _fake_scales,
)
cast_op = _define(
    "cast(Tensor x, Tensor quant_scale, ScalarType dtype, int[2] block) -> Tensor",
    cast,
    lambda x, quant_scale, dtype, block: x.new_empty(x.shape, dtype=dtype),
)
round_op = _define(
    "round(Tensor x, Tensor quant_scale, ScalarType dtype, int[2] block) -> Tensor",
    round,
    lambda x, quant_scale, dtype, block: x.new_empty(x.shape, dtype=torch.float32),
)
quantize_delayed_op = _define(
    "quantize_delayed(Tensor x, Tensor quant_scale, ScalarType dtype, int margin, bool rounded, bool codes) -> "
    "(Tensor rounded, Tensor codes, Tensor quant_scale, Tensor dequant_scale, Tensor amax)",
    quantize_delayed,
    _fake_quantize_delayed,
)
decode_op = _define("decode(Tensor q) -> Tensor", decode, lambda q: q.new_empty(q.shape, dtype=torch.float32))
scaled_product_op = _define(
    "scaled_product(Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor? bias,"
    " ScalarType out_dtype) -> Tensor",
    scaled_product,
    lambda left, right, scale_left, scale_right, bias, out_dtype: left.new_empty(
        (left.shape[0], right.shape[1]), dtype=out_dtype
    ),
)
