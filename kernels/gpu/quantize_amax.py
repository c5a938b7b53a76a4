"""Quantize a tensor by a known scale and record its amax: one read, one write, one atomic a program.

    q    = fp8(clamp(x * quant_scale, -F, F) + 0 * x)      F: the largest value of the format
    amax = max(amax, max |x|)                              -1 before anything was recorded; NaN wins over Inf

x: fp32/bf16/fp16, contiguous, any shape; quant_scale, amax: one fp32 each -> q: fp8, x's shape; amax in place.

``0 * x`` makes Inf a NaN: the saturating cast alone would turn it into F and hide an overflow from a loss scaler.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_compile.kernels.delayed_scaling import cast_delayed
from fp8_compile.kernels.formats import format_of

from .tile import largest_magnitude, magnitude_bits, record_amax, saturated

# 32 elements a thread: two 16-byte stores of FP8, four 16-byte loads of bf16 in flight.
BLOCK, NUM_WARPS = 4096, 4


@triton.jit
def quantize_amax_kernel(
    x_ptr,
    quant_scale_ptr,
    q_ptr,
    amax_ptr,
    numel,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements a program."""
    # A tensor may have more than 2**31 elements: offsets are int64 before they are multiplied.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    record_amax(amax_ptr, magnitude_bits(x))
    q = saturated(x, tl.load(quant_scale_ptr), LARGEST) + 0.0 * x
    tl.store(q_ptr + offsets, q.to(q_ptr.dtype.element_ty), mask=inside)


def quantize_amax(x: Tensor, quant_scale: Tensor, dtype: torch.dtype, amax: Tensor) -> Tensor:
    """q; amax (one fp32) is raised in place. An empty tensor records 0."""
    if not x.is_contiguous():
        raise ValueError(
            f"quantize_amax expects a contiguous tensor, got strides {x.stride()}; "
            "call .contiguous(), or quantize_transpose, which takes any strides"
        )
    q = torch.empty_like(x, dtype=dtype)
    quantize_amax_kernel[(max(1, triton.cdiv(x.numel(), BLOCK)),)](
        x, quant_scale, q, amax, x.numel(), LARGEST=format_of(dtype).max, BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return q


def reference(x: Tensor, quant_scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q and max |x| in plain PyTorch."""
    return cast_delayed(x, quant_scale, dtype), largest_magnitude(x)
