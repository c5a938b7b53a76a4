"""Quantize a tile to NVFP4 for training: rotation, rounding at random, codes and swizzled scales.

    store_nvfp4(x, ...)      the formulas of kernels/nvfp4_swizzled.py on one tile of a matrix that is in registers

Kernels that Inductor writes call it with what they have computed (``kernels/inductor/nvfp4_swizzled.py``), once for
each direction; ``quantize_nvfp4_kernel`` calls it with a tile that it has loaded.

To nearest even, two values become a byte by the hardware's instruction (cvt to e2m1x2) on compute capability 10.x and
12.x (``HARDWARE``), and by comparisons in the interpreter, which give the same. Rounding at random is done in software
everywhere: the instruction of 10.x (cvt.rs) takes other bits of a random number than the formula does, so that a B200
would compute other gradients than an RTX 5090 or a CPU from the same seed.
"""

from __future__ import annotations

import functools
from typing import Any, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_compile.kernels.mx_swizzled import scales_size
from fp8_compile.kernels.nvfp4_swizzled import HowSwizzled
from fp8_compile.kernels.nvfp4_training import SIGNS, SIZE
from fp8_compile.kernels.sum_tiles import TILE_ROWS

from .tile import clamped, magnitude_bits, reciprocal

NEGATIVE = sum(1 << place for place, sign in enumerate(SIGNS) if sign < 0)
NUM_WARPS = 8


@triton.jit
def store_nvfp4(
    x,  # [T, T] fp32, zeros outside of the matrix
    enc_ptr,
    seed_ptr,
    codes_ptr,
    scales_ptr,
    outer_at,  # the tile's first row of codes, and its first k
    k_at,
    outer,
    k,
    numbered,
    TURN: tl.constexpr,  # x has k along its rows
    FACTOR: tl.constexpr,
    SQUARE: tl.constexpr,  # one scale per 16x16
    ROTATED: tl.constexpr,
    RANDOM: tl.constexpr,
    STREAM: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    HARDWARE: tl.constexpr,
    NEGATIVE: tl.constexpr,
):
    """Codes and scales of one tile in one direction."""
    T: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = T // 16
    v = tl.trans(x) if TURN else x
    if ROTATED:
        v = _rotated(v, NEGATIVE, T)
    bits = tl.max(tl.reshape(magnitude_bits(v), [T, BLOCKS, 16]), 2)
    if SQUARE:
        bits = tl.max(tl.reshape(bits, [BLOCKS, 16, BLOCKS]), 1, keep_dims=True)
        bits = tl.reshape(tl.broadcast_to(bits, [BLOCKS, 16, BLOCKS]), [T, BLOCKS])
    amax = bits.to(tl.float32, bitcast=True)
    enc = tl.load(enc_ptr) * FACTOR
    rows = outer_at.to(tl.int64) + tl.arange(0, T)
    scale = _scale(amax, enc, 6.0)
    if RANDOM:
        pairs = _packed(_at_random(_scaled(v, scale, enc, T), seed_ptr, rows, k_at, numbered, STREAM, T), T)
    elif FOUR_OVER_SIX:
        pairs = _pairs(_scaled(v, scale, enc, T), HARDWARE, T)
        other = _scale(amax, enc, 4.0)
        others = _pairs(_scaled(v, other, enc, T), HARDWARE, T)
        # Below 0 where the other is better. Booleans in another layout would be bits on the stack.
        gain = _error(others, other, v, enc, SQUARE, T) - _error(pairs, scale, v, enc, SQUARE, T)
        scale = tl.where(gain < 0, other.to(tl.uint8, bitcast=True), scale.to(tl.uint8, bitcast=True))
        scale = scale.to(tl.float8e4nv, bitcast=True)
        of_pair = tl.broadcast_to(tl.reshape(gain, [T, BLOCKS, 1]), [T, BLOCKS, 8])
        pairs = tl.where(tl.reshape(of_pair, [T, T // 2]) < 0, others, pairs)
    else:
        pairs = _pairs(_scaled(v, scale, enc, T), HARDWARE, T)

    byte = k_at // 2 + tl.arange(0, T // 2)
    pairs = tl.where(2 * byte[None, :] < numbered, pairs, tl.zeros_like(pairs))  # a rotation makes -0 of zeros
    at = rows[:, None] * (k // 2) + byte[None, :]
    tl.store(codes_ptr + at, pairs, (rows[:, None] < outer) & (byte[None, :] < k // 2))
    column = k_at // 16 + tl.arange(0, BLOCKS)
    r, c = rows[:, None], column[None, :]
    at = (r // 128 * tl.cdiv(k, 64) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    tl.store(scales_ptr + at, scale.to(tl.uint8, bitcast=True), (r < outer) & (c < k // 16))


@triton.jit
def _rotated(v, NEGATIVE: tl.constexpr, T: tl.constexpr):
    """16 k's at a time by diag(SIGNS) H16 / 4, summed in the order of the fast transform."""
    # A product, not a negation: Triton subtracts from 0, which makes 0 of -0.
    sign = tl.where(((NEGATIVE >> (tl.arange(0, T) % 16)) & 1) == 1, -1.0, 1.0)
    v = v * sign[None, :]
    v = _butterflies(v, 1, T)
    v = _butterflies(v, 2, T)
    v = _butterflies(v, 4, T)
    v = _butterflies(v, 8, T)
    return v * 0.25


@triton.jit
def _butterflies(v, HALF: tl.constexpr, T: tl.constexpr):
    """Sums and differences of k's that are HALF apart."""
    first, second = tl.split(tl.permute(tl.reshape(v, [T, T // (2 * HALF), 2, HALF]), [0, 1, 3, 2]))
    both = tl.join(first + second, first - second)
    return tl.reshape(tl.permute(both, [0, 1, 3, 2]), [T, T])


@triton.jit
def _scale(amax, enc, LARGEST: tl.constexpr):
    """The scale of a block, which maps its largest value to that value of E2M1; NaN where one is not finite."""
    # Not the constant's own precision: the formula's 1/6 is rounded to FP32 before it multiplies.
    wide = amax * (enc * tl.full([], 1.0 / LARGEST, tl.float32))
    return (tl.minimum(wide, 448.0) + amax * 0.0).to(tl.float8e4nv)


@triton.jit
def _scaled(v, scale, enc, T: tl.constexpr):
    """What is rounded to E2M1."""
    mult = tl.minimum(reciprocal(scale.to(tl.float32) * _inverse(enc)), 3.4028234663852886e38)
    return clamped(v * _spread(mult, T), -6.0, 6.0)


@triton.jit
def _inverse(enc):
    return tl.div_rn(tl.full([], 1.0, tl.float32), enc)


@triton.jit
def _spread(of_block, T: tl.constexpr):
    """A value of each block to its 16 elements: [T, T / 16] -> [T, T]."""
    BLOCKS: tl.constexpr = T // 16
    return tl.reshape(tl.broadcast_to(tl.reshape(of_block, [T, BLOCKS, 1]), [T, BLOCKS, 16]), [T, T])


@triton.jit
def _pairs(v, HARDWARE: tl.constexpr, T: tl.constexpr):
    """Bytes of two codes each, to nearest even."""
    even, odd = tl.split(tl.reshape(v, [T, T // 2, 2]))
    return nearest_by_hardware(even, odd) if HARDWARE else nearest_by_comparing(even, odd)


@triton.jit
def _nearest(v):
    """Codes to nearest even: how many bounds are below, which of a tie's neighbours is even in the comparison."""
    a = tl.abs(v)
    code = (a > 0.25).to(tl.uint8) + (a >= 0.75).to(tl.uint8) + (a > 1.25).to(tl.uint8)
    code += (a >= 1.75).to(tl.uint8) + (a > 2.5).to(tl.uint8) + (a >= 3.5).to(tl.uint8) + (a > 5.0).to(tl.uint8)
    return code | _sign(v)


@triton.jit
def _sign(v):
    return ((v.to(tl.uint32, bitcast=True) >> 31) << 3).to(tl.uint8)


@triton.jit
def _at_random(v, seed_ptr, rows, k_at, numbered, STREAM: tl.constexpr, T: tl.constexpr):
    """Codes, up or down at random."""
    # Four elements in a row share the four words of one counter.
    counter = (rows[:, None] * numbered + (k_at + 4 * tl.arange(0, T // 4))[None, :]) >> 2
    low, high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed_ptr), low, high, tl.zeros_like(low) + STREAM, tl.zeros_like(low))
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [T, T])
    uniform = (words >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
    magnitude = tl.abs(v)
    t = magnitude + uniform * tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
    # floor(t / step) is 0 to 3, 2 to 3 and 2 to 3 for steps of 0.5, 1 and 2: the codes from 0, 4 and 6 on.
    steps = tl.where(t < 2.0, t * 2.0, tl.where(t < 4.0, t, t * 0.5))
    code = tl.minimum(steps.to(tl.int32), 3) + tl.where(t < 2.0, 0, tl.where(t < 4.0, 2, 4))
    return code.to(tl.uint8) | _sign(v)


@triton.jit
def _error(pairs, scale, v, enc, SQUARE: tl.constexpr, T: tl.constexpr):
    """The squared error of each block, summed in the order of the reference."""
    BLOCKS: tl.constexpr = T // 16
    codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), [T, T]).to(tl.int32)
    code = codes & 7
    value = tl.where(code < 4, code.to(tl.float32) * 0.5, tl.where(code < 6, code - 2, 2 * code - 8).to(tl.float32))
    value = (value.to(tl.int32, bitcast=True) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)
    # The product of code and scale is exact; what is rounded must not be contracted with what follows.
    off = (
        rounded_product(value * _spread(scale.to(tl.float32), T), tl.full([T, T], 1.0, tl.float32) * _inverse(enc)) - v
    )
    sums = _folded(_folded(tl.reshape(rounded_product(off, off), [T * BLOCKS, 16]), T * BLOCKS, 8), T * BLOCKS, 4)
    sums = tl.reshape(_folded(_folded(sums, T * BLOCKS, 2), T * BLOCKS, 1), [T, BLOCKS])
    if SQUARE:
        rows = tl.reshape(tl.permute(tl.reshape(sums, [BLOCKS, 16, BLOCKS]), [0, 2, 1]), [BLOCKS * BLOCKS, 16])
        rows = _folded(_folded(rows, BLOCKS * BLOCKS, 8), BLOCKS * BLOCKS, 4)
        rows = _folded(_folded(rows, BLOCKS * BLOCKS, 2), BLOCKS * BLOCKS, 1)
        rows = tl.broadcast_to(tl.reshape(rows, [BLOCKS, 1, BLOCKS]), [BLOCKS, 16, BLOCKS])
        sums = tl.reshape(rows, [T, BLOCKS])
    return sums


@triton.jit
def _folded(sums, ROWS: tl.constexpr, HALF: tl.constexpr):
    """[ROWS, 2 * HALF] -> [ROWS, HALF]: the upper half added to the lower one."""
    low, high = tl.split(tl.permute(tl.reshape(sums, [ROWS, 2, HALF]), [0, 2, 1]))
    return low + high


@triton.jit
def _packed(codes, T: tl.constexpr):
    """Two codes in a byte, the lower half first."""
    even, odd = tl.split(tl.reshape(codes, [T, T // 2, 2]))
    return even | (odd << 4)


@triton.jit
def nearest_by_hardware(even, odd):
    """The bytes of two codes each, to nearest even."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b8 pair<4>;
        cvt.rn.satfinite.e2m1x2.f32 pair0, $5, $1;
        cvt.rn.satfinite.e2m1x2.f32 pair1, $6, $2;
        cvt.rn.satfinite.e2m1x2.f32 pair2, $7, $3;
        cvt.rn.satfinite.e2m1x2.f32 pair3, $8, $4;
        mov.b32 $0, {pair0, pair1, pair2, pair3};
        }""",
        constraints="=r,r,r,r,r,r,r,r,r",
        args=[even, odd],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def nearest_by_comparing(even, odd):
    """What ``nearest_by_hardware`` gives, where there is no such instruction."""
    return _nearest(even) | (_nearest(odd) << 4)


@triton.jit
def rounded_product(a, b):
    """``a * b``, which the compiler may not make one operation with a sum."""
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", constraints="=f,f,f", args=[a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def plain_product(a, b):
    """What ``rounded_product`` gives where nothing is contracted."""
    return a * b


# What the interpreter, which knows no instructions of a GPU, runs in their place.
INTERPRETED = {"nearest_by_hardware": nearest_by_comparing, "rounded_product": plain_product}


@triton.jit
def quantize_nvfp4_kernel(
    x_ptr,
    enc_ptr,
    seed_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    cols,
    row_stride,
    col_stride,
    numbered,
    TRANSPOSE: tl.constexpr,
    FACTOR: tl.constexpr,
    SQUARE: tl.constexpr,
    ROTATED: tl.constexpr,
    RANDOM: tl.constexpr,
    STREAM: tl.constexpr,
    FOUR_OVER_SIX: tl.constexpr,
    HARDWARE: tl.constexpr,
    NEGATIVE: tl.constexpr,
    T: tl.constexpr,
):
    """A tile of T x T per program, in one direction."""
    across = tl.cdiv(cols, T)
    row_at, col_at = tl.program_id(0) // across * T, tl.program_id(0) % across * T
    row = row_at.to(tl.int64) + tl.arange(0, T)[:, None]
    col = col_at.to(tl.int64) + tl.arange(0, T)[None, :]
    x = tl.load(x_ptr + row * row_stride + col * col_stride, (row < rows) & (col < cols), 0.0).to(tl.float32)
    outer_at, k_at = (col_at, row_at) if TRANSPOSE else (row_at, col_at)
    outer, k = (cols, rows) if TRANSPOSE else (rows, cols)
    store_nvfp4(
        x,
        enc_ptr,
        seed_ptr,
        codes_ptr,
        scales_ptr,
        outer_at,
        k_at,
        outer,
        k,
        numbered,
        TRANSPOSE,
        FACTOR,
        SQUARE,
        ROTATED,
        RANDOM,
        STREAM,
        FOUR_OVER_SIX,
        HARDWARE,
        NEGATIVE,
    )


@functools.cache
def has_e2m1(device: int) -> bool:
    """True for a GPU with an instruction that converts to E2M1."""
    return torch.cuda.get_device_capability(device)[0] in (10, 12)


def quantize_nvfp4_swizzled(x: Tensor, enc: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """The operation where it is no store of a generated kernel: x is read once for each direction."""
    how = HowSwizzled(*options)
    (rows, cols), (outer, k) = x.shape, how.sizes(x)
    codes = x.new_empty((outer, k // 2), dtype=torch.uint8)
    scales = x.new_zeros(scales_size(outer, k // SIZE), dtype=torch.uint8)
    if x.numel():
        programs = triton.cdiv(rows, TILE_ROWS) * triton.cdiv(cols, TILE_ROWS)
        random = how.seed is not None
        quantize_nvfp4_kernel[(programs,)](
            *(how.used(x), enc, how.seed if random else enc, codes, scales),
            *(rows, cols, *x.stride(), how.numbered),
            TRANSPOSE=how.transpose,
            HARDWARE=x.is_cuda and has_e2m1(x.device.index),
            num_warps=NUM_WARPS,
            **constants(how.factor, how.block, how.rotated, random, how.stream, how.four_over_six),
        )
    return codes, scales.view(torch.float8_e4m3fn)


def quantize_nvfp4_tiles(
    x: Tensor, enc: Tensor, factor: float, four_over_six: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same for a weight, in both layouts."""
    along_columns, along_rows = (
        quantize_nvfp4_swizzled(
            x, enc, factor, (SIZE, SIZE), transpose, False, None, 0, four_over_six, x.shape[not transpose]
        )
        for transpose in (False, True)
    )
    return *along_columns, *along_rows


def constants(
    factor: float, block: Sequence[int], rotated: bool, random: bool, stream: int, four_over_six: bool
) -> dict[str, object]:
    """What ``quantize_nvfp4_kernel`` is compiled for, but for the direction and the hardware."""
    return {
        "FACTOR": factor,
        "SQUARE": block[0] == SIZE,
        "ROTATED": rotated,
        "RANDOM": random,
        "STREAM": stream,
        "FOUR_OVER_SIX": four_over_six,
        "NEGATIVE": NEGATIVE,
        "T": TILE_ROWS,
    }
