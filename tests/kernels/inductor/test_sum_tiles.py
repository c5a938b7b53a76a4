"""Sums of a matrix's columns over tiles of its rows; the code for it: tests/fp8_compile/test_generated_gpu_code.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fp8_compile.kernels.sum_tiles import TILE_ROWS, sum_tiles, sum_tiles_op


@pytest.mark.parametrize("rows", [0, 1, TILE_ROWS - 1, TILE_ROWS, TILE_ROWS + 1, 5 * TILE_ROWS + 3])
def test_each_row_of_the_result_is_the_sum_of_a_tile(rows: int) -> None:
    x = torch.randn(rows, 24).bfloat16().t().contiguous().t()  # columns lie in memory
    result = sum_tiles_op(x)
    assert result.shape == (math.ceil(rows / TILE_ROWS), 24) and result.dtype is torch.float32
    for index, tile in enumerate(x.double().split(TILE_ROWS) if rows else ()):
        torch.testing.assert_close(result[index].double(), tile.sum(0), rtol=1e-6, atol=1e-5)


def test_what_is_not_finite_reaches_its_own_column_of_its_own_tile() -> None:
    x = torch.ones(3 * TILE_ROWS, 8)
    x[TILE_ROWS, 2], x[TILE_ROWS + 1, 3] = torch.nan, torch.inf
    result = sum_tiles(x)
    assert result[1, 2].isnan() and result[1, 3] == torch.inf
    assert result.isfinite().sum() == result.numel() - 2


def test_the_fake_result_is_like_the_real_one() -> None:
    with FakeTensorMode() as mode:
        fake = sum_tiles_op(mode.from_tensor(torch.ones(130, 16, dtype=torch.float16)))
    real = sum_tiles_op(torch.ones(130, 16, dtype=torch.float16))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
