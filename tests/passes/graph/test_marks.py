"""One mark per node: what it says, who inherits it, and where it survives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from joint_graph import copy_graph, joint_graph, make, run_passes, split
from torch import Tensor, fx, nn

from fp8_compile.passes.graph.marks import KEY, UNMARKED, Kind, Mark, inherited, mark_of, marked, set_mark, source_of

aten = torch.ops.aten


def chain(*kinds: Kind | None) -> list[fx.Node]:
    """A placeholder and one call per kind, each of which reads the node before it."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for kind in kinds:
        nodes.append(graph.call_function(aten.abs.default, (nodes[-1],)))
        if kind is not None:
            set_mark(nodes[-1], kind=kind)
    graph.output(nodes[-1])
    return nodes


def test_a_node_without_a_mark_says_nothing() -> None:
    _, node = chain(None)
    assert mark_of(node) == UNMARKED == Mark() and KEY not in node.meta
    assert not any(marked(node, kind) for kind in Kind)


def test_a_mark_can_be_replaced_and_not_changed() -> None:
    _, node = chain(Kind.CAST)
    before = mark_of(node)
    set_mark(node, delayed=3)
    assert mark_of(node) == Mark(kind=Kind.CAST, delayed=3) and before == Mark(kind=Kind.CAST)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.delayed = 4  # type: ignore[misc]
    with pytest.raises(TypeError, match="fp8_delayed"):
        set_mark(node, fp8_delayed=3)


def test_a_mark_set_in_a_copy_of_a_graph_is_not_seen_in_the_original() -> None:
    _, node = chain(Kind.CAST)
    twin = copy_graph(node.graph)
    copied = next(one for one in twin.nodes if one.op == "call_function")
    assert mark_of(copied) is mark_of(node)
    set_mark(copied, delayed=3)
    assert mark_of(node).delayed is None


def test_the_placeholder_of_a_saved_tensor_is_not_part_of_what_made_it() -> None:
    x, _ = chain(None)
    set_mark(x, kind=Kind.SCALES)
    assert mark_of(x).kind is Kind.SCALES and not marked(x, Kind.SCALES)


def test_the_matmul_is_inherited_and_nothing_else() -> None:
    _, like = chain(Kind.GEMM)
    assert inherited(None, like) is None
    set_mark(like, site="mm", module="up", gemm="output", saved=True)
    assert inherited(None, like) == Mark(site="mm", module="up", gemm="output")
    assert inherited(Mark(kind=Kind.CAST, site="other"), like) == dataclasses.replace(
        Mark(kind=Kind.CAST), site="mm", module="up", gemm="output"
    )


def test_a_chain_of_one_kind_is_followed_to_its_source() -> None:
    x, cast, first, last = chain(Kind.CAST, Kind.SCALES, Kind.SCALES)
    assert source_of(last, Kind.SCALES) is source_of(first, Kind.SCALES) is cast
    assert source_of(cast, Kind.CAST) is x and source_of(last, Kind.CAST) is last


def test_a_part_that_was_folded_into_a_constant_is_a_source() -> None:
    _, node = chain(Kind.SCALES)
    node.args = ([2, 3], 0.0)
    assert source_of(node, Kind.SCALES) is node


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("target, recipe", [("cpu", "delayed"), ("cuda:90", "rowwise"), ("cuda:100", "tensorwise")])
def test_every_gemm_of_both_halves_says_which_matmul_it_replaces(target: str, recipe: str) -> None:
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    made = split(Mlp().bfloat16(), x, target=target, recipe=recipe)
    marks = [mark_of(node) for half in (made.forward, made.backward) for node in half.nodes if marked(node, Kind.GEMM)]
    rows = {(row.node, row.module, row.gemm) for row in made.report.rewritten}
    assert len(marks) == 6 and {(mark.site, mark.module, mark.gemm) for mark in marks} == rows


def test_after_the_passes_only_what_is_lowered_is_marked_as_part_of_a_quantize() -> None:
    joint = joint_graph(Mlp(), torch.randn(16, 32, requires_grad=True))
    steps = {step.name: step.graph for step in run_passes(joint, make("cuda:90"))}
    uses = [mark_of(node).use for node in steps["ShareQuantizes"].nodes]
    assert any(use is not None for use in uses)
    assert not any(mark_of(node).use for node in steps["LowerQuantizes"].nodes)
    lowered = [node for node in steps["LowerQuantizes"].nodes if marked(node, Kind.CAST) or marked(node, Kind.SCALES)]
    assert lowered and all(mark_of(node).quantize == (mark_of(node).quantize[0], (-1, -1)) for node in lowered)
