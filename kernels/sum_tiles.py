"""Sum the columns of a matrix over tiles of its rows, inside whatever kernel computes the matrix.

    y[i, n] = sum of x[m, n] over T * i <= m < T * (i + 1)        x: [M, N] -> y: [ceil(M / T), N] fp32, T: TILE_ROWS

A bias's gradient is a sum over the rows of a gradient that is also quantized. To Inductor that is a reduction: a kernel
of its own, which reads the gradient, or all that it is computed from, once more. On a GPU this operation is a store
instead (``kernels/inductor/sum_tiles.py``), which Inductor fuses like any other store into the kernel that quantizes.
What is left to sum is one row per TILE_ROWS.
"""

from __future__ import annotations

import torch

from .define_op import define

TILE_ROWS = 64  # FP8 rows of 64 bytes: two sectors of a GPU's memory, in either layout


def sum_tiles(x: torch.Tensor) -> torch.Tensor:
    """The formula above in plain PyTorch."""
    rows, cols = x.shape
    return torch.nn.functional.pad(x.float(), (0, 0, 0, -rows % TILE_ROWS)).view(-1, TILE_ROWS, cols).sum(1)


def _fake(x: torch.Tensor) -> torch.Tensor:
    rows, cols = x.shape
    return x.new_empty(((rows + TILE_ROWS - 1) // TILE_ROWS, cols), dtype=torch.float32)


sum_tiles_op = define("sum_tiles(Tensor x) -> Tensor", sum_tiles, _fake)
