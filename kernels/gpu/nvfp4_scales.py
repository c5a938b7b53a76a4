"""Block scales as the tensor cores of sm_100 read them: tiles of 128 rows by 4 blocks, swizzled.

    offset of scale [r, c] in its tile: (r % 32) * 16 + (r // 32 % 4) * 4 + c % 4;  tiles row by row, 512 bytes each

[N, C] e4m3 -> [N', C'], N and C filled with zeros to multiples of 128 and 4: what ``_scaled_mm`` takes for NVFP4.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, COLUMNS = 128, 4


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    return rows + -rows % ROWS, columns + -columns % COLUMNS


def swizzle(block_scales: Tensor) -> Tensor:
    """[N, C] -> [N', C']."""
    rows, columns = block_scales.shape
    new_rows, new_columns = padded_shape(rows, columns)
    plain = torch.nn.functional.pad(block_scales.view(torch.uint8), (0, new_columns - columns, 0, new_rows - rows))
    tiles = plain.view(new_rows // ROWS, 4, 32, new_columns // COLUMNS, COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(new_rows, new_columns).view(block_scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """[N', C'] -> [N, C]: the inverse of ``swizzle``."""
    new_rows, new_columns = padded_shape(rows, columns)
    tiles = swizzled.view(torch.uint8).view(new_rows // ROWS, new_columns // COLUMNS, 32, 4, COLUMNS)
    plain = tiles.permute(0, 3, 2, 1, 4).reshape(new_rows, new_columns)
    return plain[:rows, :columns].contiguous().view(swizzled.dtype)
