"""Packages whose model writes to its buffers, such as a count of the tokens in a cache."""

from __future__ import annotations

import pathlib

import torch
from torch import Tensor, nn

import fp8_compile

SHAPES = (), (1,), (2,)


class Counter(nn.Module):
    """Adds how often it was called, by a buffer of each shape."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            self.register_buffer(f"count{index}", torch.zeros(shape))

    def forward(self, x: Tensor) -> list[Tensor]:
        for count in self.buffers():
            count.add_(1)
        return [x + count.amax() for count in self.buffers()]


def test_a_buffer_counts_calls_however_few_numbers_it_has(tmp_path: pathlib.Path) -> None:
    """One package for all of the shapes: what takes its time is the C++."""
    fp8_compile.export(Counter().eval(), (torch.zeros(2),), tmp_path / "count.pt2")
    package = fp8_compile.load(tmp_path / "count.pt2")
    for call in (1, 2, 3, 4):
        assert [float(one[0]) for one in package(torch.zeros(2))] == [call] * len(SHAPES)
