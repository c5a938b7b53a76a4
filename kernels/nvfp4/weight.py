"""A matrix in NVFP4, and the scales that all methods share.

    w = e2m1 * e4m3_block_scale * global_scale          blocks of 16 along K: 4.5 bits a weight

codes: uint8 [N, K'/2], block_scales: e4m3 [N, K'/B], global_scale: fp32 []; K' is K filled with zeros to whole blocks.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from . import e2m1

BLOCK_SIZES = (16, 32)  # 16 is NVFP4; 32 is what early sketches of the format had
SCALE_DTYPE = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-9
SAFE_GLOBAL_SCALE = 2.0**-118  # (1 / it) / SMALLEST_SCALE is finite
SCALE_CODES = range(1, 127)  # bytes of the 126 finite E4M3 numbers above 0
# Largest block scale that the block with the largest element gets: all of E4M3 for rounding to nearest, less for the
# methods that search, so that this block too can have a larger scale than its amax calls for.
NEAREST_RANGE, SEARCH_RANGE = 448.0, 256.0


@dataclasses.dataclass(frozen=True)
class NVFP4Weight:
    """An [N, K] matrix in NVFP4."""

    codes: Tensor
    block_scales: Tensor
    global_scale: Tensor
    columns: int  # K

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.columns

    @property
    def block_size(self) -> int:
        return block_size_of(self.codes, self.block_scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The [N, K] matrix."""
        return dequantize(self.codes, self.block_scales, self.global_scale, self.columns, dtype)

    def to(self, device: torch.device | str) -> NVFP4Weight:
        codes, block_scales, global_scale = (
            part.to(device) for part in (self.codes, self.block_scales, self.global_scale)
        )
        return NVFP4Weight(codes, block_scales, global_scale, self.columns)


def with_global_scale(weight: NVFP4Weight, shared: Tensor) -> NVFP4Weight | None:
    """The same numbers by another global scale, whose block scales make up for it; None where E4M3 does not have
    them. It has them where the scales are a power of two apart and no block scale leaves E4M3's range."""
    numbers = weight.block_scales.to(torch.float64) * weight.global_scale.to(torch.float64)
    wanted = shared.to(torch.float32).to(weight.global_scale.device)
    block_scales = (numbers / wanted.to(torch.float64)).clamp(-E4M3_MAX, E4M3_MAX).to(SCALE_DTYPE)
    if not torch.equal(block_scales.to(torch.float64) * wanted.to(torch.float64), numbers):
        return None
    return NVFP4Weight(weight.codes, block_scales, wanted, weight.columns)


def block_size_of(codes: Tensor, block_scales: Tensor) -> int:
    return 2 * codes.shape[1] // block_scales.shape[1] if block_scales.shape[1] else BLOCK_SIZES[0]


def dequantize(
    codes: Tensor, block_scales: Tensor, global_scale: Tensor, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``(e2m1 * block_scale) * global_scale``: the first product is exact, the second rounds once, in FP32."""
    rows, count = codes.shape[0], block_scales.shape[1]
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    scales = block_scales.to(torch.float32).unsqueeze(-1)
    for part in chunks(rows, 2 * codes.shape[1]):
        blocks = e2m1.values_of_packed(codes[part]).view(-1, count, block_size_of(codes, block_scales))
        blocks = (blocks * scales[part]).mul_(global_scale)
        out[part] = blocks.view(blocks.shape[0], 2 * codes.shape[1])[:, :columns]
    return out


def global_scale_of(amax: Tensor, block_range: float) -> Tensor:
    """``amax / (block_range * 6)``; 1 for a matrix of zeros. Its reciprocal is finite, whatever the amax.

    It is rounded to a number that is the reciprocal of its reciprocal, because compressed-tensors stores ``1 / g``. Two
    reciprocals give one: of g's mantissa and that of ``1 / g`` one is below sqrt(2), and there ``1 / x`` is injective.
    """
    scale = amax.to(torch.float32) / (block_range * e2m1.LARGEST)
    normal = scale.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, 1.0, normal.reciprocal().reciprocal())


def block_scale_of(amax: Tensor, global_scale: Tensor, smallest: float = SMALLEST_SCALE) -> Tensor:
    """``e4m3(clamp((amax / 6) / global, smallest, 448))``."""
    return (amax / e2m1.LARGEST / global_scale).clamp(smallest, E4M3_MAX).to(SCALE_DTYPE)


def multiplier_of(block_scales: Tensor, global_scale: Tensor) -> Tensor:
    """What a weight is multiplied by to be rounded to E2M1: ``(1 / global) / s``, each division rounded by itself."""
    return (1.0 / global_scale) / block_scales.to(torch.float32)


def blocks_of(w: Tensor, block_size: int) -> Tensor:
    """[N, K] -> FP32 [N, K'/B, B], filled with zeros."""
    rows, columns = w.shape
    filled = torch.nn.functional.pad(w.to(torch.float32), (0, -columns % block_size))
    return filled.reshape(rows, -1, block_size)


def encode(blocks: Tensor, block_scales: Tensor, global_scale: Tensor) -> Tensor:
    """Packed codes, [N, K'/2], of the values nearest to the weights under given scales."""
    rows, count, size = blocks.shape
    packed = torch.empty(rows, count * size // 2, dtype=torch.uint8, device=blocks.device)
    # Asking costs a GPU's queue, as activations are rounded in every product; the answer, three operations.
    tiny = global_scale.device.type != "cpu" or bool(global_scale < SAFE_GLOBAL_SCALE)
    for part in chunks(rows, count * size):
        multiplier = multiplier_of(block_scales[part], global_scale).unsqueeze(-1)
        y = blocks[part] * multiplier
        if tiny:  # where the multiplier exceeds FP32, in two steps
            scales = block_scales[part].to(torch.float32).unsqueeze(-1)
            y = torch.where(multiplier.isinf(), blocks[part] * (1.0 / global_scale) / scales, y)
        packed[part] = e2m1.pack(e2m1.codes_of(y)).view(y.shape[0], -1)
    return packed


def chunks(rows: int, width: int, elements: int = 1 << 18) -> list[slice]:
    """Rows by as many as stay in the cache while a dozen operations go over them."""
    step = max(1, elements // max(width, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
