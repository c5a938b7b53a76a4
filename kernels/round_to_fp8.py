"""Round FP32 values to FP8 values without leaving FP32: the reference of ``round`` in ``kernels/cpu``.

    round_to_fp8(x) == x.to(fp8).to(float32)      for |x| <= max of the format; NaN stays NaN, -0 may become 0

Compilers vectorise these few FP32 operations everywhere; a cast to FP8 and back is scalar code on CPUs without AVX-512.
"""

from __future__ import annotations

import torch

from .formats import Format


def round_to_fp8(x: torch.Tensor, format: Format) -> torch.Tensor:
    """Round to nearest even in the format, result in FP32.

    Normal range, Veltkamp's splitting: with ``c = x * (2**(24 - p) + 1)``, ``c - (c - x)`` is x rounded to
    p significand bits. Below it, the spacing is the constant ``s = 2**(min_exponent - p + 1)``: adding and
    taking away ``1.5 * 2**23 * s`` makes the FP32 adder round to multiples of s.
    """
    dropped = 24 - format.significand_bits
    c = x * float(2**dropped + 1)
    normal = c - (c - x)
    anchor = 1.5 * 2.0 ** (23 + format.min_exponent - format.significand_bits + 1)
    subnormal = (x + anchor) - anchor
    return torch.where(x.abs() < 2.0**format.min_exponent, subnormal, normal)
