"""What is noted of the weights of a training graph, and that the graph stays as it is."""

from __future__ import annotations

import functools

import pytest
import torch
from graph_text import render
from joint_graph import JointGraph, apply, joint_graph, make
from torch import nn

from fp8_compile.passes.graph.weight_grid import POWER_BLOCKS, WeightGrid
from fp8_compile.passes.joint.note_grids import NoteGrids
from fp8_compile.passes.joint.rewrite_matmuls import RewriteMatmuls
from fp8_compile.passes.joint.share_quantizes import ShareQuantizes


class Two(nn.Module):
    """A layer, and one whose weight is a product of parameters: no packed layer could have its grid."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(128, 256, bias=False)
        self.left, self.right = nn.Parameter(torch.randn(128, 256)), nn.Parameter(torch.randn(128, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.plain(x) @ (self.left * self.right).t()


@functools.cache
def graph() -> JointGraph:
    return joint_graph(Two(), torch.randn(128, 128, requires_grad=True))


def noted(recipe: str, target: str) -> list[WeightGrid]:
    rules, joint = make(target, recipe=recipe), graph()
    copy = joint.copy()
    for one in (RewriteMatmuls(rules, joint.names), ShareQuantizes()):
        apply(one, copy)
    before, notes = render(copy), NoteGrids(rules)
    assert notes.applies(copy)
    assert apply(notes, copy) == 0 and render(copy) == before
    return notes.grids


@pytest.mark.parametrize(
    "recipe, target, expected, format",
    [
        ("rowwise", "cpu", "rowwise", "e4m3"),
        ("blockwise", "cpu", "blockwise", "e4m3"),
        ("blockwise", "cuda:100", POWER_BLOCKS, "e4m3"),
        ("mxfp8", "cuda:100", "mxfp8", "e4m3"),
        ("nvfp4", "cpu", "nvfp4", "e2m1"),
    ],
)
def test_only_parameters_have_a_grid_and_it_is_that_of_the_target(
    recipe: str, target: str, expected: str, format: str
) -> None:
    (grid,) = noted(recipe, target)
    assert (grid.recipe, grid.format, grid.delayed, grid.weight.product) == (expected, format, False, "plain.weight")
    assert WeightGrid.from_list(grid.to_list()) == grid
