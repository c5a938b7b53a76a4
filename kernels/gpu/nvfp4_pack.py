"""Pack a matrix as NVFP4: 4-bit values, an E4M3 scale per block of 16, one FP32 scale for all; rounded to nearest.

    w            = e2m1 * e4m3_block_scale * global_scale
    amax_b       = max |x| over the block, 16 along a row
    s            = e4m3(clamp((amax_b / 6) / global_scale, 2**-9, 448))
    codes        = e2m1(clamp(x * ((1 / global_scale) / s), -6, 6))         to nearest, ties to even

x: [N, K] fp32/bf16/fp16, contiguous, K a multiple of 16; global_scale: one fp32, ``amax / (448 * 6)``
-> codes: uint8 [N, K/2], even k in the low nibble, bit 3 the sign; block_scales: e4m3 [N, K/16].

All in FP32 in that order, each division rounded by itself: bit-equal to torchao's NVFP4 where no block scale is below
2**-6. There torchao stops, at E4M3's smallest normal number; 2**-9, its smallest number, keeps eight times smaller
blocks from rounding to zeros (``smallest=2**-6`` gives torchao's). A global scale of 0 (a matrix of zeros) counts as
1, so that zeros stay zeros. E2M1: 0 .5 1 1.5 2 3 4 6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .nvfp4_scales import padded_shape
from .tile import clamped, magnitude_bits

SIZE = 16
SMALLEST = 2.0**-9
BLOCK, NUM_WARPS = 512, 4  # blocks of 16 a program: 8192 elements, 16 bytes or 32 of codes a thread

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between two neighbours; a tie goes to the even code


@triton.jit
def nvfp4_pack_kernel(
    x_ptr,
    global_scale_ptr,
    codes_ptr,
    block_scales_ptr,
    blocks,  # N * K / 16
    per_row,  # K / 16
    SWIZZLED: tl.constexpr,  # block scales as nvfp4_scales.swizzle lays them out
    SMALLEST: tl.constexpr,  # block scale
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """BLOCK blocks of SIZE elements per program: rows are contiguous, so where one ends does not matter."""
    # A tensor may have more than 2**31 elements: offsets are int64 before they are multiplied.
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = block < blocks
    k = tl.arange(0, SIZE)
    x = tl.load(x_ptr + block[:, None] * SIZE + k[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    global_scale = tl.load(global_scale_ptr)
    global_scale = tl.where(global_scale == 0.0, 1.0, global_scale)

    # Every division as IEEE rounds it: plain ``/`` on FP32 is off by two units in the last place on NVIDIA.
    amax = tl.max(magnitude_bits(x), axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.div_rn(amax, tl.full([BLOCK], 6.0, tl.float32)), tl.broadcast_to(global_scale, [BLOCK]))
    scale = clamped(scale, SMALLEST, 448.0).to(tl.float8e4nv)
    at = block
    if SWIZZLED:
        row, column = block // per_row, block % per_row
        at = (row // 128 * tl.cdiv(per_row, 4) + column // 4) * 512 + row % 32 * 16 + row // 32 % 4 * 4 + column % 4
    tl.store(block_scales_ptr + at, scale, mask=inside)
    inverse = tl.div_rn(tl.full([1], 1.0, tl.float32), global_scale)
    scaled = x * tl.div_rn(tl.broadcast_to(inverse, [BLOCK]), scale.to(tl.float32))[:, None]

    # The code is how many bounds are below, which of a tie's two neighbours is even being in the comparison. A NaN is
    # below none: its block's scale is NaN.
    magnitude = tl.abs(scaled)
    code = (magnitude > 0.25).to(tl.uint8) + (magnitude >= 0.75).to(tl.uint8) + (magnitude > 1.25).to(tl.uint8)
    code += (magnitude >= 1.75).to(tl.uint8) + (magnitude > 2.5).to(tl.uint8) + (magnitude >= 3.5).to(tl.uint8)
    code += (magnitude > 5.0).to(tl.uint8)
    code |= ((scaled.to(tl.uint32, bitcast=True) >> 31) << 3).to(tl.uint8)
    even, odd = tl.split(tl.reshape(code, [BLOCK, SIZE // 2, 2]))
    # Flat: a block has 8 bytes, and only along one dimension does Triton store 16 at once.
    at = tl.program_id(0).to(tl.int64) * (BLOCK * SIZE // 2) + tl.arange(0, BLOCK * SIZE // 2)
    packed = tl.reshape(even | (odd << 4), [BLOCK * SIZE // 2])
    tl.store(codes_ptr + at, packed, mask=at < blocks * tl.full([], SIZE // 2, tl.int64))


def nvfp4_pack(
    x: Tensor, global_scale: Tensor, smallest: float = SMALLEST, swizzled: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes and block scales; ``swizzled``: the latter as ``nvfp4_scales.swizzle`` gives them."""
    if x.shape[-1] % SIZE or not x.is_contiguous():
        raise ValueError(
            f"nvfp4_pack expects a contiguous [N, K] matrix, K a multiple of {SIZE}, got {tuple(x.shape)} with strides "
            f"{x.stride()}; pad K with zeros, call .contiguous()"
        )
    rows, cols = x.shape
    codes = torch.empty(rows, cols // 2, dtype=torch.uint8, device=x.device)
    shape = padded_shape(rows, cols // SIZE) if swizzled else (rows, cols // SIZE)
    make = torch.zeros if swizzled else torch.empty
    block_scales = make(shape, dtype=torch.uint8, device=x.device).view(torch.float8_e4m3fn)
    blocks = rows * (cols // SIZE)
    if blocks:
        nvfp4_pack_kernel[(triton.cdiv(blocks, BLOCK),)](
            x,
            global_scale,
            codes,
            block_scales,
            blocks,
            cols // SIZE,
            SWIZZLED=swizzled,
            SMALLEST=smallest,
            BLOCK=BLOCK,
            SIZE=SIZE,
            num_warps=NUM_WARPS,
        )
    return codes, block_scales


def reference(x: Tensor, global_scale: Tensor, smallest: float = SMALLEST) -> tuple[Tensor, Tensor]:
    """The same in plain PyTorch."""
    rows, cols = x.shape
    tiles = x.to(torch.float32).reshape(rows, cols // SIZE, SIZE)
    global_scale = torch.where(global_scale == 0, 1.0, global_scale)
    scale = tiles.abs().amax(-1) / 6.0 / global_scale
    block_scales = scale.clamp(smallest, 448.0).to(torch.float8_e4m3fn)
    scaled = (tiles * ((1.0 / global_scale) / block_scales.float()).unsqueeze(-1)).clamp(-6.0, 6.0)
    bounds = torch.tensor(BOUNDS, device=x.device)
    magnitude = scaled.abs().unsqueeze(-1)
    even_above = torch.arange(len(BOUNDS), device=x.device) % 2 == 1  # a tie at these goes up
    above = torch.where(even_above, magnitude >= bounds, magnitude > bounds)
    codes = (above.sum(-1) + 8 * scaled.signbit()).to(torch.uint8).reshape(rows, cols // 2, 2)
    return codes[..., 0] | (codes[..., 1] << 4), block_scales
