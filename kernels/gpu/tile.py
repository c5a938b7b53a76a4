"""What several kernels do to a tile: scale and saturate, find the largest magnitude, take reciprocals as PyTorch does.

    loaded(x, VIA)     = x in FP32, rounded to bf16 or fp16 before where autocast would
    magnitude_bits(x)  = bits of |x| as int32
    clamped(x, a, b)   = clamp(x, a, b), NaN stays NaN
    saturated(x, s)    = clamp(x * s, -F, F), NaN stays NaN
    reciprocal(x)      = 1 / x, rounded to nearest even
    scales_of(amax)    = F / amax, amax / F; the latter NaN if amax is not finite

Magnitudes are compared as integers: for floats without a sign the order is the same, Inf is above every finite number
and NaN above Inf. A maximum of floats loses NaN, in ``tl.max`` as in the hardware's atomic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

VIA = {None: 0, torch.bfloat16: 1, torch.float16: 2}  # what a kernel is told for the dtype that x is rounded to first
NOTHING = -1.0  # in an amax slot: nothing was recorded. Its bits are a negative int32, so that any magnitude wins.


@triton.jit
def loaded(x, VIA: tl.constexpr):
    """x in FP32, as it is or rounded by way of bf16 (1) or fp16 (2)."""
    if VIA == 1:
        x = x.to(tl.bfloat16)
    elif VIA == 2:
        x = x.to(tl.float16)
    return x.to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as int32, x: FP32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def record_amax(amax_ptr, bits):
    """Raise the FP32 slot to the largest of these magnitudes: one atomic per program, in no order with other memory."""
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True), tl.max(bits), sem="relaxed")


@triton.jit
def saturated(x, quant_scale, LARGEST: tl.constexpr):
    """``clamp(x * quant_scale, -F, F)``; a NaN, of x or of the scale, stays one."""
    return clamped(x * quant_scale, -LARGEST, LARGEST)


@triton.jit
def clamped(x, LEAST: tl.constexpr, MOST: tl.constexpr):
    """``clamp(x, LEAST, MOST)``; a NaN stays one, since it compares as neither below nor above.

    Not by ``tl.clamp``: beside stores of single bytes, its min.NaN and max.NaN make Triton miscompile them, seen as
    rare NaNs (triton#11111). This can go when that issue is closed in every Triton we allow.
    """
    return tl.where(x < LEAST, LEAST, tl.where(x > MOST, MOST, x))


@triton.jit
def reciprocal(x):
    """1 / x as IEEE rounds it: plain ``/`` on FP32 is off by two units in the last place on NVIDIA.

    A scale is ``reciprocal(amax) * F``, two roundings, because that is what PyTorch makes of ``F / amax``.
    """
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def scales_of(amax_bits, LARGEST: tl.constexpr):
    """quant and dequant scale of a block whose largest magnitude has these bits, as ``quantize.scales`` has them."""
    FLOOR_BITS: tl.constexpr = 0x2B8CBCCC  # of 1e-12
    amax = tl.maximum(amax_bits, FLOOR_BITS).to(tl.float32, bitcast=True)
    quant_scale = reciprocal(amax) * LARGEST
    return quant_scale, reciprocal(quant_scale) + amax * 0.0


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """The reference of what ``record_amax`` records: max |x| in FP32, 0 for an empty tensor, NaN where there is one."""
    return x.abs().amax().to(torch.float32) if x.numel() else x.new_zeros((), dtype=torch.float32)
