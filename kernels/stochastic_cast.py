"""Cast to FP8, rounding up or down at random so that the expected value is the value.

    v = clamp(x * quant_scale, -F, F) + 0 * x            F: the largest value of the format; Inf becomes NaN
    q = sign(v) * step * (floor(|v| / step) + (u < fraction(|v| / step)))

u uniform in [0, 1), step: the format's spacing at |v|. x: any shape, fp32/bf16/fp16; quant_scale: broadcasts to x.

Plain operations that Inductor fuses into the producer of x, its own random numbers included: they follow
``torch.manual_seed``.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from .formats import Format, format_of

EXPONENT_BITS = 0x7F800000  # of an FP32 number


def cast_stochastic(x: Tensor, quant_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The formula above with torch's random numbers."""
    wide = x.contiguous().to(torch.float32)
    return round_at_random(wide, quant_scale, dtype, torch.rand_like(wide))


def round_at_random(wide: Tensor, quant_scale: Tensor, dtype: torch.dtype, uniform: Tensor) -> Tensor:
    """The formula above with random numbers given."""
    format = format_of(dtype)
    v = (wide * quant_scale).clamp(-format.max, format.max) + wide * 0.0
    magnitude = v.abs()
    step = _power_of_two(magnitude, format) * 2.0 ** (1 - format.significand_bits)
    steps = magnitude / step  # exact, as step is a power of two
    whole = steps.floor()
    rounded = (whole + (uniform < steps - whole)) * step
    return torch.where(v < 0, -rounded, rounded).to(dtype)


def _power_of_two(magnitude: Tensor, format: Format) -> Tensor:
    """The largest power of two that is not above a number, or that of the smallest normal FP8 number."""
    (least,) = struct.unpack("i", struct.pack("f", 2.0**format.min_exponent))
    return (magnitude.view(torch.int32) & EXPONENT_BITS).clamp_min(least).view(torch.float32)
