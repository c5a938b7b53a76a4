"""Quantize by a known scale, rounding up or down at random so that the expected value is the value; record the amax.

    v    = clamp(x * quant_scale, -F, F)                 F: the largest value of the format
    q    = sign(v) * step * floor(|v| / step + u)        u uniform in [0, 1), step: the format's spacing at |v|
    amax = max(amax, max |x|)                            -1 before anything was recorded; NaN wins over Inf

x: fp32/bf16/fp16, contiguous, any shape; quant_scale, amax: one fp32 each; seed: an int
-> q: fp8, x's shape, NaN where x is Inf or NaN; amax in place.

E[q] = v to 2**-32 of a step, subnormal values included. Element i takes word i % 4 of Philox4x32-10 with counter i // 4
and key ``seed``: the same seed gives the same bytes, whatever the size of a block.

In integers on the FP32 bits, so that every target rounds alike. With ``significand`` of 24 bits, ``whole = significand
>> shift`` are the bits that FP8 keeps and the bits below are the fraction of a step, compared with a random word. FP8
codes are in order of magnitude, so adding 1 to a code is the next value, carry into the exponent included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_compile.kernels.formats import Format, format_of

from .tile import largest_magnitude, magnitude_bits, record_amax, saturated

BLOCK, NUM_WARPS = 4096, 4


@triton.jit
def stochastic_rounding_kernel(
    x_ptr,
    quant_scale_ptr,
    q_ptr,
    amax_ptr,
    seed,
    numel,
    LARGEST: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,  # of the smallest normal number
    FNUZ: tl.constexpr,  # one NaN, 0x80, and no negative zero
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program, a multiple of 4."""
    # A tensor may have more than 2**31 elements: offsets are int64 before they are multiplied.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    record_amax(amax_ptr, magnitude_bits(x))
    v = saturated(x, tl.load(quant_scale_ptr), LARGEST) + 0.0 * x

    # Four words a Philox call: one call an element would be bound by its multiplications, not by memory.
    counters = tl.program_id(0).to(tl.int64) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    a, b, c, d = tl.randint4x(seed, counters)
    random = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(tl.uint32, bitcast=True)

    bits = v.to(tl.uint32, bitcast=True)
    sign = (bits >> 31) << 7
    exponent = ((bits >> 23) & 0xFF).to(tl.int32)
    significand = (bits & 0x7FFFFF) | 0x800000
    above = exponent - (127 + MIN_EXPONENT)  # exponents above the smallest normal number, negative: subnormal
    shift = (23 - MANTISSA_BITS) + tl.maximum(-above, 0)
    # Shifts of 32 and more are undefined; the significand has 24 bits, so 31 is as good. FP32's own subnormals, whose
    # first bit is not there, end as 0 that way.
    whole = significand >> tl.minimum(shift, 31).to(tl.uint32)
    fraction = tl.where(
        shift <= 32,
        significand << tl.minimum(32 - shift, 31).to(tl.uint32),
        significand >> tl.minimum(tl.maximum(shift - 32, 0), 31).to(tl.uint32),
    )
    code = (tl.maximum(above, 0).to(tl.uint32) << MANTISSA_BITS) + whole + (random < fraction).to(tl.uint32)
    if FNUZ:
        code = tl.where(v != v, 0x80, tl.where(code == 0, 0, code | sign))
    else:
        code = tl.where(v != v, 0x7F, code | sign)
    tl.store(q_ptr.to(tl.pointer_type(tl.uint8), bitcast=True) + offsets, code.to(tl.uint8), mask=inside)


def quantize_stochastic(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, amax: Tensor, seed: int) -> Tensor:
    """q; amax (one fp32) is raised in place. An empty tensor records 0."""
    if not x.is_contiguous():
        raise ValueError(
            f"quantize_stochastic expects a contiguous tensor, got strides {x.stride()}; call .contiguous()"
        )
    format = format_of(dtype)
    q = torch.empty_like(x, dtype=dtype)
    stochastic_rounding_kernel[(max(1, triton.cdiv(x.numel(), BLOCK)),)](
        x,
        quant_scale,
        q,
        amax,
        seed,
        x.numel(),
        LARGEST=format.max,
        MANTISSA_BITS=format.significand_bits - 1,
        MIN_EXPONENT=format.min_exponent,
        FNUZ=_is_fnuz(format),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return q


def reference(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, random: Tensor) -> tuple[Tensor, Tensor]:
    """q and max |x| in plain PyTorch; ``random``: integers in [0, 2**32), one an element.

    In FP64, which holds |v| / step and its sum with a fraction of 32 bits exactly.
    """
    format = format_of(dtype)
    wide = x.to(torch.float32)
    v = ((wide * quant_scale).clamp(-format.max, format.max) + wide * 0.0).double()
    _, exponent = v.abs().frexp()
    step = 2.0 ** ((exponent - 1).clamp_min(format.min_exponent) - (format.significand_bits - 1)).double()
    steps = v.abs() / step
    # The kernel compares 32 bits of the fraction: what lies below them is cut here too.
    fraction = ((steps - steps.floor()) * 2.0**32).floor()
    magnitude = (steps.floor() + (random.reshape(x.shape) < fraction)) * step
    q = torch.where(v.isnan(), v, torch.copysign(magnitude, v)).to(torch.float32).to(dtype)
    return q, largest_magnitude(x)


def random_integers(seed: int, count: int) -> Tensor:
    """The kernel's random words in plain PyTorch, int64: word i % 4 of Philox4x32-10 at counter i // 4."""
    low = 0xFFFFFFFF
    counter = torch.arange((count + 3) // 4, dtype=torch.int64)
    words = [counter & low, counter >> 32, torch.zeros_like(counter), torch.zeros_like(counter)]
    keys = [seed & low, (seed >> 32) & low]
    for _ in range(10):
        high_b, low_b = _multiply(0xCD9E8D57, words[2])
        high_a, low_a = _multiply(0xD2511F53, words[0])
        words = [high_b ^ words[1] ^ keys[0], low_b, high_a ^ words[3] ^ keys[1], low_a]
        keys = [(keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low]
    return torch.stack(words, 1).reshape(-1)[:count]


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32-bit product, by halves: the whole does not fit into an int64."""
    low, high = constant * (word & 0xFFFF), constant * (word >> 16)
    middle = (low >> 16) + high
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def _is_fnuz(format: Format) -> bool:
    return format.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
