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
from fp8_compile.kernels.formats import BY_DTYPE, E5M2, format_of
from fp8_compile.kernels.quantize import AMAX_FLOOR, WHOLE, is_tiled

from . import loop_split
from .library import library
from .operation import DTYPES, define

loop_split.install()

LEAST_PARALLEL = 1 << 17  # elements; one thread quantizes as many in some 0.2 ms
_AXES = {(True, True): 0, (False, True): 1, (True, False): 2}  # by (block[0] == WHOLE, block[1] == WHOLE)


def scales(x: Tensor, dtype: torch.dtype, block: list[int]) -> tuple[Tensor, Tensor]:
    kernels = library()
    if kernels is None:
        return reference.scales(x, dtype, block)
    x = x.contiguous()
    amax = x.new_empty(_scale_shape(x, block), dtype=torch.float32)
    rows, cols = x.shape
    kernels.fp8_amax(x.data_ptr(), DTYPES[x.dtype], rows, cols, _axis(block), amax.data_ptr(), _threads(x))
    amax.clamp_(min=AMAX_FLOOR)
    quant_scale = amax.reciprocal().mul_(BY_DTYPE[dtype].max)
    return quant_scale, quant_scale.reciprocal().add_(amax.mul_(0.0))


def cast(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, block: list[int]) -> Tensor:
    kernels = library()
    if kernels is None:
        return reference.cast(x, quant_scale, dtype, block)
    x, quant_scale = x.contiguous(), quant_scale.contiguous()
    q = torch.empty(x.shape, dtype=dtype)
    kernels.fp8_quantize(
        *(x.data_ptr(), DTYPES[x.dtype], *x.shape, _axis(block), quant_scale.data_ptr()),
        *(dtype == E5M2.dtype, q.data_ptr(), _threads(x)),
    )
    return q


def quantize_delayed(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, margin: int, codes: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes (empty unless wanted), quant_scale as used, dequant_scale, amax."""
    kernels = library()
    if kernels is None:
        return _quantize_delayed_plainly(x, quant_scale, dtype, margin, codes)
    x = x.contiguous()
    q, used, dequant_scale, amax = _fake_quantize_delayed(x, quant_scale, dtype, margin, codes)
    used.copy_(quant_scale)
    kernels.fp8_delayed(
        *(x.data_ptr(), DTYPES[x.dtype], x.numel(), 2.0**margin, dtype == E5M2.dtype, used.data_ptr()),
        *(q.data_ptr() if codes else None, amax.data_ptr(), _threads(x)),
    )
    torch.reciprocal(used, out=dequant_scale)
    return q, used, dequant_scale, amax


def _quantize_delayed_plainly(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, margin: int, codes: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    amax = reference.block_amax(x, (WHOLE, WHOLE))
    used = delayed_reference.first_scale(quant_scale, amax, format_of(dtype).max, margin).reshape(1, 1)
    q = delayed_reference.cast_delayed(x, used, dtype) if codes else x.new_empty(0, dtype=dtype)
    return q, used, used.reciprocal(), amax


def _fake_quantize_delayed(
    x: Tensor, quant_scale: Tensor, dtype: torch.dtype, margin: int, codes: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q = x.new_empty(x.shape if codes else (0,), dtype=dtype)
    return q, *(x.new_empty((1, 1), dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


def _fake_scales(x: Tensor, dtype: torch.dtype, block: list[int]) -> tuple[Tensor, Tensor]:
    shape = _scale_shape(x, block)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.float32)


def _axis(block: list[int]) -> int:
    assert not is_tiled(block), block
    return _AXES[block[0] == WHOLE, block[1] == WHOLE]


def _scale_shape(x: Tensor, block: list[int]) -> list[int]:
    return [1 if extent == WHOLE else size for size, extent in zip(x.shape, block)]


def _threads(x: Tensor) -> int:
    """Waking threads for less takes longer than the work, and on busy cores much longer."""
    return torch.get_num_threads() if x.numel() >= LEAST_PARALLEL else 1


scales_op = define(
    "scales(Tensor x, ScalarType dtype, int[2] block) -> (Tensor quant_scale, Tensor dequant_scale)",
    scales,
    _fake_scales,
)
cast_op = define(
    "cast(Tensor x, Tensor quant_scale, ScalarType dtype, int[2] block) -> Tensor",
    cast,
    lambda x, quant_scale, dtype, block: x.new_empty(x.shape, dtype=dtype),
)
quantize_delayed_op = define(
    "quantize_delayed(Tensor x, Tensor quant_scale, ScalarType dtype, int margin, bool codes) -> "
    "(Tensor codes, Tensor quant_scale, Tensor dequant_scale, Tensor amax)",
    quantize_delayed,
    _fake_quantize_delayed,
)
