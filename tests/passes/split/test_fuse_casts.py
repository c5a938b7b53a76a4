"""The casts of quantizes: plain ops while the graph is split, then one op each, with the same bits."""

from __future__ import annotations

import pytest
import torch
from graph_text import ops
from joint_graph import Split, apply, assert_same_results, copy_graph, random_inputs, split
from torch import Tensor, nn

from fp8_compile.passes.graph.marks import Kind, marked, set_mark
from fp8_compile.passes.split.fuse_casts import FuseCasts


class Gelu(nn.Module):
    """Rows of 300: the last block of a row is not full."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(256, 300), nn.Linear(300, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def halves(recipe: str, *, dynamic: bool = False) -> Split:
    x = torch.randn(40, 256, requires_grad=True)
    return split(Gelu(), x, target="cuda:90", recipe=recipe, dynamic=dynamic)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_every_cast_becomes_one_op_with_the_same_bits(recipe: str) -> None:
    made = halves(recipe, dynamic=recipe == "rowwise")
    total = 0
    for graph in (made.forward, made.backward):
        fused = copy_graph(graph)
        changes = apply(FuseCasts(), fused)
        total += changes
        assert ops(fused).get("cast_blocks", 0) == changes
        assert not any(marked(node, Kind.CAST) for node in fused.nodes)
        assert_same_results(graph, fused, random_inputs(graph))
    assert total >= 4


def test_a_delayed_cast_is_left() -> None:
    """It adds ``0 * x`` and records the amax of x beside it."""
    made = halves("tensorwise").forward
    for node in made.nodes:
        if marked(node, Kind.CAST):
            set_mark(node, delayed=0)
    assert apply(FuseCasts(), made) == 0


def test_a_value_that_was_saved_in_the_middle_of_a_cast_stays_as_it_is() -> None:
    graph = copy_graph(halves("tensorwise").forward)
    product = next(node for node in graph.nodes if marked(node, Kind.CAST) and "mul" in node.name)
    with graph.inserting_before(next(iter(graph.nodes))):
        saved = graph.placeholder("saved")
    saved.meta = dict(product.meta)
    count = apply(FuseCasts(), copy_graph(graph))
    product.replace_all_uses_with(saved)
    assert apply(FuseCasts(), graph) == count - 1
