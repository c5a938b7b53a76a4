"""NVFP4 as gemms of a Blackwell GPU read it: the codes of ``nvfp4_training.py``, and its scales where the hardware
wants them.

    codes, s = quantize_nvfp4(x, enc * factor, block, ...)                    the formulas of nvfp4_training.py
    scales   = swizzle(s, one row of scales per row of codes)                 the order of mx_swizzled.py, K/16 columns

x: [R, C] fp32/bf16/fp16, R and C multiples of 32 -> codes: [outer, K/2] uint8, (outer, K) = (R, C), or (C, R) with
``transpose``; scales: flat e4m3, where no scale goes 0. A tile of 16x16 has its scale 16 times. The number at random of
element e = row * ``numbered`` + k: ``numbered`` is K as it was before zeros were added, rounded up to 16, so that the
numbers are those of a CPU. What is beyond it is 0.

On a GPU this operation is a store (``kernels/inductor/nvfp4_swizzled.py``), which Inductor fuses into whatever computes
x: both directions of a tensor are two stores of one kernel, which reads the tensor once.

    y = alpha * sum_k left[m, k] * right[n, k] + bias + added           left: [M, K/2], right: [N, K/2], alpha: [1]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .define_op import define
from .mx_swizzled import scales_size, swizzle, unswizzle
from .nvfp4_training import BLOCKS, SIZE, dequantize_nvfp4, quantize_nvfp4
from .operands import ANY, FP32, check, check_value
from .quantize import HIGH_PRECISION, Block

MULTIPLE = 32  # of both sizes of a tensor: K in bytes is then a multiple of the 16 that cuBLASLt wants


class HowSwizzled(NamedTuple):
    """How a tensor is quantized: what the operation takes after x and enc."""

    factor: float
    block: Block
    transpose: bool
    rotated: bool
    seed: Tensor | None
    stream: int
    four_over_six: bool
    numbered: int

    def sizes(self, x: Tensor) -> tuple[int, int]:
        """The rows of codes, and K."""
        rows, cols = x.shape
        return (cols, rows) if self.transpose else (rows, cols)

    def used(self, x: Tensor) -> Tensor:
        """x without the zeros that were added to it."""
        return x[: self.numbered] if self.transpose else x[:, : self.numbered]


def quantize_nvfp4_swizzled(x: Tensor, enc: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The first formulas above in plain PyTorch; ``options`` are those of ``HowSwizzled``."""
    how = HowSwizzled(*options)
    outer, k = how.sizes(x)
    codes, scales = quantize_nvfp4(how.used(x), enc * how.factor, *how[1:-1])
    rows = scales.view(torch.uint8).repeat_interleave(how.block[0], 0)[:outer]
    codes = torch.nn.functional.pad(codes, (0, k // 2 - codes.shape[1]))
    rows = torch.nn.functional.pad(rows, (0, k // SIZE - rows.shape[1]))
    return codes, swizzle(rows).view(scales.dtype)


def swizzled_nvfp4_mm(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    alpha: Tensor,
    added: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The last formula above in plain PyTorch."""
    values = []
    for codes, flat in ((left, scale_left), (right, scale_right)):
        rows, half = codes.shape
        scales = unswizzle(flat.view(torch.uint8), rows, half // (SIZE // 2)).contiguous().view(flat.dtype)
        values.append(dequantize_nvfp4(codes, scales))
    y = (values[0] @ values[1].t()) * alpha.reshape(())
    for one in (bias, added):
        y = y if one is None else y + one
    return y.to(out_dtype)


def _fake(x: Tensor, enc: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    outer, k = HowSwizzled(*options).sizes(x)
    return (
        x.new_empty((outer, k // 2), dtype=torch.uint8),
        x.new_empty(scales_size(outer, k // SIZE), dtype=torch.float8_e4m3fn),
    )


def _checked(x: Tensor, enc: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    how = HowSwizzled(*options)
    name = "quantize_nvfp4_swizzled"
    check(name, "x", x, HIGH_PRECISION, (ANY, ANY))
    for size in x.shape:
        check_value(name, f"{size} modulo {MULTIPLE}", size % MULTIPLE, (0,))
    check(name, "enc", enc, FP32, (1, 1))
    check_value(name, "block", tuple(how.block), BLOCKS)
    return quantize_nvfp4_swizzled(x, enc, *how)


def quantize_nvfp4_tiles(
    x: Tensor, enc: Tensor, factor: float, four_over_six: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A weight in both layouts, with the same values: codes and scales along its columns, then along its rows."""
    along_columns, along_rows = (
        _checked(x, enc, factor, (SIZE, SIZE), transpose, False, None, 0, four_over_six, x.shape[not transpose])
        for transpose in (False, True)
    )
    return *along_columns, *along_rows


def _tiles_fake(x: Tensor, enc: Tensor, factor: float, four_over_six: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = (enc, factor, (SIZE, SIZE))
    both = (_fake(x, *options, transpose, False, None, 0, four_over_six, 0) for transpose in (False, True))
    along_columns, along_rows = both
    return *along_columns, *along_rows


quantize_nvfp4_swizzled_op = define(
    "quantize_nvfp4_swizzled(Tensor x, Tensor enc, float factor, int[2] block, bool transpose, bool rotated,"
    " Tensor? seed, int stream, bool four_over_six, SymInt numbered) -> (Tensor codes, Tensor scales)",
    _checked,
    _fake,
    cuda="fp8_compile.kernels.gpu.nvfp4_tile:quantize_nvfp4_swizzled",
)
quantize_nvfp4_tiles_op = define(
    "quantize_nvfp4_tiles(Tensor x, Tensor enc, float factor, bool four_over_six)"
    " -> (Tensor codes, Tensor scales, Tensor codes_t, Tensor scales_t)",
    quantize_nvfp4_tiles,
    _tiles_fake,
    cuda="fp8_compile.kernels.gpu.nvfp4_tile:quantize_nvfp4_tiles",
)
