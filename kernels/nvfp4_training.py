"""NVFP4 in training: 4-bit values, an E4M3 scale per block of 16, and one FP32 scale of the whole tensor.

    v            = x, or its transpose; rotated: 16 k's at a time by diag(SIGNS) H16 / 4
    s            = e4m3(min(a * (enc * (1/6)), 448)) + 0 * a                     a: largest magnitude of the block
    mult         = min(1 / (float(s) * (1/enc)), FLT_MAX)
    code         = e2m1(clamp(v * mult, -6, 6))                    to nearest even, or at random by Philox
    value        = code * s / enc

    y[m, n]      = dequant_left * dequant_right * sum_k left[m, k] * right[n, k] + bias[n]

x: [R, C] fp32/bf16/fp16, v: [rows, K]; enc [1, 1] fp32: 2688 / amax, 1 where that is 0. -> codes: [rows, K'/2] uint8,
the lower half of a byte first; scales: [rows, K'/16] e4m3, or [ceil(rows/16), K'/16] of 16x16 tiles. K' is the next
multiple of 16, and what is beyond K is zero. ``0 * a`` makes the scale NaN where the block holds an Inf or NaN; what
the codes of such a block are does not matter.

Left and right are codes with their scales, along k both, [M, K'/2] and [N, K'/2]; dequant [1, 1] is 1 / enc. A code
times an E4M3 scale is exact in bf16: only the sums in FP32 round.

Rounding at random: step is 0.5, 1 or 2 for a magnitude below 2, below 4, or above; t = |v * mult| + u * step; then
code = min(floor(t / step') * step', 6), where step' is the step at t. u = (word >> 8) * 2**-24. The word of element
e = row * K' + k is number e % 4 of Philox4x32-10 with the key ``seed`` and the counter (e // 4, stream, 0), 64 bits,
then 32 bits each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .define_op import define
from .delayed_scaling import scale_of
from .formats import E2M1
from .operands import ANY, FLOATS, FP32, check, check_value
from .quantize import HIGH_PRECISION, WHOLE, Block, block_amax, spread

SIZE = 16
BLOCKS = ((1, SIZE), (SIZE, SIZE))
LARGEST = E2M1.max  # what the largest magnitude of a tensor becomes
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
MOST_GROWTH = 4.0  # of the largest magnitude, by a rotation: 16 values of it, summed, divided by 4
FOUR_OF_SIX = 4.0 / 7.0  # scales are below 256 then, so that 1.5 times of one is below 448
_FLT_MAX = torch.finfo(torch.float32).max
_MASK = 0xFFFFFFFF


class How(NamedTuple):
    """How a tensor is quantized: what the operation takes after x and enc. ``seed`` [1] int64: round at random.
    ``four_over_six``: each block takes the scale that maps its largest value to 6 or to 4, whichever has the smaller
    squared error; ``enc`` is 1536 / amax then, so that the larger scale fits."""

    block: Block
    transpose: bool
    rotated: bool
    seed: Tensor | None
    stream: int
    four_over_six: bool


def rotate(v: Tensor) -> Tensor:
    """16 k's at a time by ``diag(SIGNS) H16 / 4``: [rows, K'] fp32, summed in the order of the fast transform."""
    rows, k = v.shape
    signs = torch.tensor(SIGNS, dtype=v.dtype, device=v.device)
    parts = v.reshape(rows, k // SIZE, SIZE) * signs
    for half in (1, 2, 4, 8):
        pairs = parts.reshape(rows, k // SIZE, SIZE // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        parts = torch.stack([first + second, first - second], -2).reshape(rows, k // SIZE, SIZE)
    return (parts * 0.25).reshape(rows, k)


def philox(seed: Tensor, stream: int, shape: tuple[int, int]) -> Tensor:
    """u of the elements of a matrix, [rows, K'] fp32 in [0, 1)."""
    elements = torch.arange(shape[0] * shape[1], device=seed.device)
    words = _philox_words(seed.reshape(()), elements >> 2, stream)
    word = torch.stack(words).gather(0, (elements & 3)[None])[0]
    return ((word >> 8).to(torch.float32) * 2.0**-24).reshape(shape)


def _philox_words(seed: Tensor, counter: Tensor, stream: int) -> list[Tensor]:
    """Philox4x32-10 in int64 that hold 32 bits each."""
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = torch.full_like(c0, stream), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _product(0xD2511F53, c0)
        high1, low1 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return [c0, c1, c2, c3]


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 32 bits of a product of 32-bit words, without overflow of int64."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return (high >> 16) & _MASK, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def to_e2m1(v: Tensor) -> Tensor:
    """Codes of magnitudes up to 6, to nearest even: 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    a = v.abs()
    code = (a > 0.25).to(torch.uint8)
    for bound, even in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code += (a >= bound if even else a > bound).to(torch.uint8)
    return code | (torch.signbit(v).to(torch.uint8) << 3)


def to_e2m1_at_random(v: Tensor, uniform: Tensor) -> Tensor:
    """Codes of magnitudes up to 6, up or down at random: the formula above."""
    a = v.abs()
    t = a + uniform * _step(a)
    step = _step(t)
    return to_e2m1(torch.copysign(((t / step).floor() * step).clamp_max(6.0), v))


def _step(a: Tensor) -> Tensor:
    return torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))


def from_e2m1(codes: Tensor) -> Tensor:
    """Values of packed codes, [rows, K'] fp32."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=codes.device)
    both = torch.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], 2 * codes.shape[1])
    return values[both.to(torch.int64)]


def operand(x: Tensor, transpose: bool, rotated: bool) -> Tensor:
    """v: [rows, K'] fp32."""
    v = (x.t() if transpose else x).to(torch.float32)
    v = torch.nn.functional.pad(v, (0, -v.shape[1] % SIZE)).contiguous()
    return rotate(v) if rotated else v


def quantize_nvfp4(x: Tensor, enc: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The formulas above in plain PyTorch; ``options`` are those of ``How``."""
    how = How(*options)
    v = operand(x, how.transpose, how.rotated)
    uniform = None if how.seed is None else philox(how.seed, how.stream, (v.shape[0], v.shape[1]))
    codes, scales = single_codes(v, enc, how.block, how.four_over_six, uniform)
    pairs = codes.reshape(v.shape[0], v.shape[1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), scales


def single_codes(
    v: Tensor, enc: Tensor, block: Block, four_over_six: bool, uniform: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes, one per byte, and scales of [rows, K']."""
    amax = block_amax(v, block)
    codes, scales = _by_largest(v, amax, enc, block, 6.0, uniform)
    if four_over_six:
        errors, others = [], _by_largest(v, amax, enc, block, 4.0, uniform)
        for some, of in ((codes, scales), others):
            values = _value_of(some) * spread(of.to(torch.float32), v.shape, block) * enc.reciprocal()
            errors.append(_block_sum((values - v) ** 2, block))
        better = errors[1] < errors[0]
        scales = torch.where(better, others[1].view(torch.uint8), scales.view(torch.uint8)).view(scales.dtype)
        codes = torch.where(spread(better, v.shape, block), others[0], codes)
    return codes, scales


def _by_largest(
    v: Tensor, amax: Tensor, enc: Tensor, block: Block, largest: float, uniform: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes, one per byte, and scales that map the largest value of a block to that value of E2M1."""
    wide = (amax * (enc * (1.0 / largest))).clamp_max(448.0) + amax * 0.0
    scales = wide.to(torch.float8_e4m3fn)
    mult = (scales.to(torch.float32) * enc.reciprocal()).reciprocal().clamp_max(_FLT_MAX)
    scaled = (v * spread(mult, v.shape, block)).clamp(-6.0, 6.0)
    return (to_e2m1(scaled) if uniform is None else to_e2m1_at_random(scaled, uniform)), scales


def _value_of(codes: Tensor) -> Tensor:
    """Values of codes, one per byte, by arithmetic alone: compilers fuse it."""
    m = (codes & 7).to(torch.float32)
    magnitude = torch.where(m < 4.0, m * 0.5, torch.where(m < 6.0, m - 2.0, m * 2.0 - 8.0))
    return torch.where(codes > 7, -magnitude, magnitude)


def _block_sum(x: Tensor, block: Block) -> Tensor:
    """Sums of blocks in an order that every device can have: k's first, then rows, upper halves added to lower ones."""
    rows, cols = x.shape
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % block[0]))
    sums = padded.view(padded.shape[0] // block[0], block[0], cols // SIZE, SIZE)
    for dim in (3, 1):
        while (size := sums.shape[dim]) > 1:
            sums = sums.narrow(dim, 0, size // 2) + sums.narrow(dim, size // 2, size // 2)
    return sums[:, 0, :, 0]


def dequantize_nvfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """``code * s`` in FP32, [rows, K']."""
    block = (1 if scales.shape[0] == codes.shape[0] else SIZE, SIZE)
    return from_e2m1(codes) * spread(scales.to(torch.float32), torch.Size((codes.shape[0], 2 * codes.shape[1])), block)


def round_nvfp4(x: Tensor, enc: Tensor, block: Block, four_over_six: bool) -> Tensor:
    """``code * s`` of a matrix, [R, C] fp32."""
    v = operand(x, False, False)
    codes, scales = single_codes(v, enc, block, four_over_six)
    return (_value_of(codes) * spread(scales.to(torch.float32), v.shape, block))[:, : x.shape[1]]


def nvfp4_mm(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    dequant_left: Tensor,
    dequant_right: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product above in plain PyTorch."""
    y = dequantize_nvfp4(left, scale_left) @ dequantize_nvfp4(right, scale_right).t()
    y = y * (dequant_left * dequant_right)
    return (y if bias is None else y + bias).to(out_dtype)


def _quantize_fake(x: Tensor, enc: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    how = How(*options)
    rows, k = x.shape[::-1] if how.transpose else x.shape
    blocks = (k + SIZE - 1) // SIZE
    lines = (rows + how.block[0] - 1) // how.block[0]
    return (
        x.new_empty((rows, blocks * (SIZE // 2)), dtype=torch.uint8),
        x.new_empty((lines, blocks), dtype=torch.float8_e4m3fn),
    )


def _quantize_checked(x: Tensor, enc: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    how = How(*options)
    check("quantize_nvfp4", "x", x, HIGH_PRECISION, (ANY, ANY))
    check("quantize_nvfp4", "enc", enc, FP32, (1, 1))
    check_value("quantize_nvfp4", "block", tuple(how.block), BLOCKS)
    if how.seed is not None:
        check("quantize_nvfp4", "seed", how.seed, (torch.int64,), (1,))
    return quantize_nvfp4(x, enc, *how)


def _mm_checked(
    left: Tensor,
    right: Tensor,
    scale_left: Tensor,
    scale_right: Tensor,
    dequant_left: Tensor,
    dequant_right: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    check("nvfp4_train_mm", "left", left, (torch.uint8,), (ANY, ANY))
    m, half = left.shape
    if half % (SIZE // 2):
        raise RuntimeError(f"fp8_compile::nvfp4_train_mm: left: expected a multiple of 8 bytes per row, got {half}")
    check("nvfp4_train_mm", "right", right, (torch.uint8,), (ANY, half))
    n, blocks = right.shape[0], half // (SIZE // 2)
    scale_dtype = (torch.float8_e4m3fn,)
    check("nvfp4_train_mm", "scale_left", scale_left, scale_dtype, (m, blocks), (-(-m // SIZE), blocks))
    check("nvfp4_train_mm", "scale_right", scale_right, scale_dtype, (n, blocks), (-(-n // SIZE), blocks))
    for name, dequant in (("dequant_left", dequant_left), ("dequant_right", dequant_right)):
        check("nvfp4_train_mm", name, dequant, FP32, (1, 1))
    if bias is not None:
        check("nvfp4_train_mm", "bias", bias, FLOATS, (n,))
    check_value("nvfp4_train_mm", "out_dtype", out_dtype, HIGH_PRECISION)
    return nvfp4_mm(left, right, scale_left, scale_right, dequant_left, dequant_right, bias, out_dtype)


def global_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """enc and dequant of a tensor by its own largest magnitude, [1, 1] each; 1 where that is 0, NaN or Inf."""
    amax = block_amax(x, (WHOLE, WHOLE))
    enc = torch.where((amax > 0) & (amax < torch.inf), scale_of(amax, LARGEST), 1.0)
    return enc, enc.reciprocal()


# Stands for the scale of a whole tensor in the graph, until it is known whether it comes from earlier steps.
global_scale_op = define(
    "global_scale(Tensor x) -> (Tensor enc, Tensor dequant)",
    global_scale,
    lambda x: (x.new_empty((1, 1), dtype=torch.float32), x.new_empty((1, 1), dtype=torch.float32)),
)
quantize_nvfp4_op = define(
    "quantize_nvfp4(Tensor x, Tensor enc, int[2] block, bool transpose, bool rotated, Tensor? seed, int stream,"
    " bool four_over_six) -> (Tensor codes, Tensor scales)",
    quantize_nvfp4,
    _quantize_fake,
    cpu=_quantize_checked,
)
nvfp4_train_mm_op = define(
    "nvfp4_train_mm(Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor dequant_left,"
    " Tensor dequant_right, Tensor? bias, ScalarType out_dtype) -> Tensor",
    nvfp4_mm,
    lambda left, right, scale_left, scale_right, dequant_left, dequant_right, bias, out_dtype: left.new_empty(
        (left.shape[0], right.shape[0]), dtype=out_dtype
    ),
    cpu=_mm_checked,
)
