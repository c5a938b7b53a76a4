"""MXFP8: E4M3 with a power of two per block of 32, rounded up so that nothing saturates.

    d            = amax * (1/448)                              amax: of the block, FP32
    scale        = the E8M0 byte of the smallest power of two that is not below d: byte b stands for 2**(b - 127)
    q            = e4m3(x * 2**(127 - b))
    y[m, n]      = sum_k left[m, k] * 2**(bl - 127) * right[k, n] * 2**(br - 127) + bias[n]

x: [R, C] fp32/bf16/fp16 -> q: [R, C] e4m3, row-major; scale: [ceil(R/r), ceil(C/c)] uint8. ``block`` (r, c) is (1, 32),
(32, 1) or (32, 32). A block with an Inf or NaN has the scale NaN (255) and codes NaN; a block of zeros has scale and
codes 0.

left: [M, K], right: [K, N], e4m3 of any strides; scale_left: [M, K/32] or [M/32, K/32], scale_right: [K/32, N] or
[K/32, N/32], sizes rounded up. A power of two times an E4M3 value is exact in bf16: only sums in FP32 round.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .define_op import define
from .operands import ANY, FLOATS, check, check_value
from .quantize import HIGH_PRECISION, Block, block_amax, spread

SIZE = 32
BLOCKS = ((1, SIZE), (SIZE, 1), (SIZE, SIZE))
NAN = 255  # of E8M0
_RECIPROCAL = 1.0 / 448.0


def e8m0_up(d: Tensor) -> Tensor:
    """The byte of the smallest power of two that is not below a number of FP32, as int32; 255 for Inf and NaN."""
    bits = d.view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + up.to(torch.int32)).clamp_max(NAN)


def power_of_e8m0(byte: Tensor) -> Tensor:
    """``2**(b - 127)`` of bytes as int32, exactly; NaN for 255."""
    normal = byte << 23
    power = torch.where(byte == 0, 0x400000, normal).view(torch.float32)  # 2**-127 is subnormal
    return torch.where(byte == NAN, torch.nan, power)


def quantize_mx(x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """The first three formulas above in plain PyTorch."""
    byte = e8m0_up(block_amax(x, block) * _RECIPROCAL)
    multiplier = power_of_e8m0((2 * 127 - byte).clamp_min(0))  # of bytes up to 254
    multiplier = torch.where(byte == NAN, torch.nan, multiplier)
    scaled = x.contiguous().to(torch.float32) * spread(multiplier, x.shape, block)
    return scaled.to(torch.float8_e4m3fn), byte.to(torch.uint8)


def dequantize_mx(q: Tensor, scale: Tensor, block: Block) -> Tensor:
    """``q * 2**(scale - 127)`` in FP32."""
    return q.to(torch.float32) * spread(power_of_e8m0(scale.to(torch.int32)), q.shape, block)


def mx_mm(
    left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The last formula above in plain PyTorch."""
    a = dequantize_mx(left, scale_left, (_lines(left.shape[0], scale_left.shape[0]), SIZE))
    b = dequantize_mx(right, scale_right, (SIZE, _lines(right.shape[1], scale_right.shape[1])))
    y = a @ b
    return (y if bias is None else y + bias).to(out_dtype)


def _lines(size: int | torch.SymInt, scales: int | torch.SymInt) -> int:
    """How many rows or columns share a scale."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # SymPy takes a second to import

    return 1 if statically_known_true(size == scales) else SIZE


def _sizes(x: Tensor, block: Block) -> list[int]:
    return [(size + b - 1) // b for size, b in zip(x.shape, block)]


def _quantize_fake(x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(_sizes(x, block), dtype=torch.uint8)


def _quantize_checked(x: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    check("quantize_mx", "x", x, HIGH_PRECISION, (ANY, ANY))
    check_value("quantize_mx", "block", tuple(block), BLOCKS)
    return quantize_mx(x, block)


def _mm_checked(
    left: Tensor, right: Tensor, scale_left: Tensor, scale_right: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    check("mx_mm", "left", left, (torch.float8_e4m3fn,), (ANY, ANY))
    m, k = left.shape
    check("mx_mm", "right", right, (torch.float8_e4m3fn,), (k, ANY))
    n, blocks = right.shape[1], -(-k // SIZE)
    check("mx_mm", "scale_left", scale_left, (torch.uint8,), (m, blocks), (-(-m // SIZE), blocks))
    check("mx_mm", "scale_right", scale_right, (torch.uint8,), (blocks, n), (blocks, -(-n // SIZE)))
    if bias is not None:
        check("mx_mm", "bias", bias, FLOATS, (n,))
    check_value("mx_mm", "out_dtype", out_dtype, HIGH_PRECISION)
    return mx_mm(left, right, scale_left, scale_right, bias, out_dtype)


quantize_mx_op = define(
    "quantize_mx(Tensor x, int[2] block) -> (Tensor q, Tensor scale)",
    quantize_mx,
    _quantize_fake,
    cpu=_quantize_checked,
)
mx_mm_op = define(
    "mx_mm(Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
    mx_mm,
    lambda left, right, scale_left, scale_right, bias, out_dtype: left.new_empty(
        (left.shape[0], right.shape[1]), dtype=out_dtype
    ),
    cpu=_mm_checked,
)
