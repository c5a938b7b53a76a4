"""Packages whose model writes to its buffers, such as a count of the tokens in a cache."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import Tensor, nn

import fp8_compile


class Counter(nn.Module):
    """Adds how often it was called, by a buffer of the given shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count.amax()


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_a_buffer_counts_calls_however_few_numbers_it_has(shape: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    fp8_compile.export(Counter(shape).eval(), (torch.zeros(2),), tmp_path / "count.pt2")
    package = fp8_compile.load(tmp_path / "count.pt2")
    assert [float(package(torch.zeros(2))[0]) for _ in range(4)] == [1, 2, 3, 4]
