"""What is checked of a graph between two passes, and when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from joint_graph import joint_graph, make
from torch import fx, nn

from fp8_compile.kernels.quantize import quantize_op
from fp8_compile.passes.graph.marks import KEY, Kind, Mark
from fp8_compile.passes.graph_pass import GraphPass, PassReport
from fp8_compile.passes.invariants import check_graph
from fp8_compile.passes.joint.lower_quantizes import LowerQuantizes
from fp8_compile.passes.pipeline import JointPipeline, Pipeline

aten = torch.ops.aten


def graph_with(mark: Mark | None = None, **meta: Any) -> fx.Graph:
    """One call, with this mark and metadata."""
    graph = fx.Graph()
    node = graph.call_function(aten.abs.default, (graph.placeholder("x"),))
    node.meta = {**meta, **({} if mark is None else {KEY: mark})}
    graph.output(node)
    return graph


@pytest.mark.parametrize(
    "graph, message",
    [
        (graph_with(), "after Some: .*abs.*: it has no value"),
        (graph_with(Mark(kind=Kind.RECOMPUTE_COPY), val=None), "an earlier pass was to remove it"),
        (graph_with(Mark(kind=Kind.GEMM, gemm="output"), val=None), "no matmul of the report"),
        (graph_with(Mark(kind=Kind.RELAYOUT), val=None), "in which layout"),
        (graph_with(Mark(kind=Kind.CAST), val=None), "part of a quantize"),
        (graph_with(Mark(kind=Kind.SCALES, scale=0), val=None), "part of a quantize"),
    ],
    ids=["no value", "left over", "gemm", "relayout", "cast", "scale"],
)
def test_a_broken_graph_is_an_error_that_names_the_pass_and_the_node(graph: fx.Graph, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_graph(graph, "Some", [Kind.RECOMPUTE_COPY])


def test_a_quantize_that_outlives_its_lowering_is_found() -> None:
    graph = graph_with(val=None)
    check_graph(graph, "Some", LowerQuantizes.leaves_no)
    next(node for node in graph.nodes if node.op == "call_function").target = quantize_op
    with pytest.raises(AssertionError, match="an earlier pass was to remove it"):
        check_graph(graph, "Some", LowerQuantizes.leaves_no)


def test_a_graph_as_passes_leave_it_is_in_order() -> None:
    joint = joint_graph(nn.Linear(32, 32), torch.randn(16, 32, requires_grad=True))
    graph = joint.copy()
    JointPipeline(make("cuda:90"), joint.names, "")(graph)
    check_graph(graph, "all", [quantize_op])


class Forgetful(GraphPass):
    """Before: anything. After: a node without a value."""

    def run(self, graph: fx.Graph) -> PassReport:
        for node in graph.nodes:
            node.meta.pop("val", None)
        return PassReport(1, "values forgotten")


class OnePass(Pipeline):
    def phase(self, graph: fx.Graph) -> str:
        return "test"


@pytest.mark.parametrize("asked", ["1", "0", "", None])
def test_graphs_are_checked_where_the_environment_asks(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if asked is None:
        monkeypatch.delenv("FP8_COMPILE_CHECK")
    else:
        monkeypatch.setenv("FP8_COMPILE_CHECK", asked)
    one = OnePass([Forgetful()], "", None)
    if asked == "1":
        with pytest.raises(AssertionError, match="after Forgetful"):
            one(graph_with(val=None))
    else:
        one(graph_with(val=None))
