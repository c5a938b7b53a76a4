"""E2M1, the 4-bit float of NVFP4: rounding to it, its codes, two of them a byte.

    values: 0 .5 1 1.5 2 3 4 6       code: 0 to 7, bit 3 the sign
    bytes:  even k in the low nibble, odd k in the high one         [..., K] -> uint8 [..., K/2]

Rounding is to nearest, a tie to the even code. The step is half of the largest power of two that is at most
``max(|y|, 1)``: adding and subtracting 1.5 * 2**22 of it leaves a multiple of the step, and the low bits of the sum are
how many.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT = 0x7F800000
_SHIFT = 1.5 * 2.0**22


def round_(y: Tensor, step: Tensor) -> Tensor:
    """Round FP32 numbers to E2M1 in place, those above 6 to 6; ``step`` is scratch of the same shape. NaN stays; what
    becomes zero loses its sign."""
    y.clamp_(-LARGEST, LARGEST)
    torch.bitwise_and(y.view(torch.int32), _EXPONENT, out=step.view(torch.int32))
    step.clamp_(min=1.0)
    return y.add_(step, alpha=_SHIFT).sub_(step, alpha=_SHIFT)  # the products are exact


def rounded(y: Tensor) -> Tensor:
    """The nearest E2M1 values, in FP32 with their sign: ``clamp(y, -6, 6)`` rounded."""
    y = y.to(torch.float32)
    return round_(y.clone(), torch.empty_like(y)).copysign_(y)


def codes_of(y: Tensor) -> Tensor:
    """Codes, uint8, of the nearest values. A NaN has some code: its block's scale has to be NaN."""
    y = y.to(torch.float32)
    magnitude = y.abs().clamp_(max=LARGEST)
    power = magnitude.clamp(min=1.0)
    power.view(torch.int32).bitwise_and_(_EXPONENT)
    count = magnitude.add_(power * _SHIFT).view(torch.int32).bitwise_and_(7)  # steps; 4 at most
    exponent = power.view(torch.int32).bitwise_right_shift_(22).sub_(2 * 127)  # 0, 2 or 4
    code = count.add_(exponent).to(torch.uint8)
    return code.bitwise_or_(y.signbit().to(torch.uint8).bitwise_left_shift_(3))


def values_of(codes: Tensor) -> Tensor:
    """FP32 values of codes, any integer dtype."""
    return _table(codes.device)[codes.to(torch.int32)]


def _table(device: torch.device) -> Tensor:
    """``VALUES``, then their negatives, made where they are needed: a copy from the host would wait for a GPU."""
    code = torch.arange(8, dtype=torch.int32, device=device)
    normal = ((code >> 1) + 126 << 23 | (code & 1) << 22).view(torch.float32)  # exponent and one bit after the point
    values = torch.where(code < 2, 0.5 * code, normal)
    return torch.cat([values, -values])


def values_of_packed(packed: Tensor) -> Tensor:
    """FP32 values of packed codes: [..., K/2] -> [..., K], two at a time by the byte."""
    table = values_of(unpack(torch.arange(256, dtype=torch.uint8, device=packed.device)[:, None]))
    return table.index_select(0, packed.reshape(-1).to(torch.int32)).view(*packed.shape[:-1], 2 * packed.shape[-1])


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """One code a byte: the inverse of ``pack``."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
