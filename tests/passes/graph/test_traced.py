"""A function is traced once for each kind of arguments, and once for all numbers where it passes a number on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from fp8_compile.passes.graph import traced as module
from fp8_compile.passes.graph.emit import inline
from fp8_compile.passes.graph.traced import passes_on


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that are traced from now on."""
    found, original = list[Any](), module._trace
    monkeypatch.setattr(module, "_traces", {})
    monkeypatch.setattr(module, "_first", {})
    monkeypatch.setattr(module, "_trace", lambda function, *rest: found.append(function) or original(function, *rest))
    return found


def graph_of(*shape: int) -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = FakeTensorMode().from_tensor(torch.empty(shape))
    return graph, x


def result(graph: fx.Graph, node: fx.Node, value: Tensor) -> Tensor:
    graph.output(node)
    found: Tensor = fx.GraphModule({}, graph)(value)
    graph.erase_node(graph.output_node())
    return found


@passes_on("row")
def row_of(table: Tensor, row: int, factor: float) -> Tensor:
    return table[0, row].view(1, 1) * factor + 1


def test_a_number_that_is_passed_on_is_traced_twice_and_right_for_every_other(traces: list[Any]) -> None:
    table = torch.randn(2, 9)
    graph, x = graph_of(2, 9)
    for row in (0, 1, 0, 7, 8, 2, 1):  # 0 and 1 are constants of the function, too
        node = inline(graph, row_of, x, row, 3.0, like=x)
        assert torch.equal(result(graph, node, table), row_of(table, row, 3.0))
        assert node.meta["val"].shape == (1, 1)
    assert len(traces) == 2
    for row, factor in ((3, 0.5), (4, 0.5), (5, 0.5)):
        node = inline(graph, row_of, x, row, factor, like=x)
        assert torch.equal(result(graph, node, table), row_of(table, row, factor))
    assert len(traces) == 4, "another factor is another trace"


def test_other_shapes_and_other_functions_are_traced_by_themselves(traces: list[Any]) -> None:
    for size in (4, 5, 4):
        graph, x = graph_of(3, size)
        for _ in range(3):
            inline(graph, torch.relu, x, like=x)
            inline(graph, torch.tanh, x, like=x)
    assert traces == [torch.relu, torch.tanh] * 2


def test_a_function_that_computes_with_its_number_is_found_out(traces: list[Any]) -> None:
    @passes_on("row")
    def wrong(table: Tensor, row: int) -> Tensor:
        return table[0, row * 2]

    graph, x = graph_of(2, 9)
    inline(graph, wrong, x, 1, like=x)
    with pytest.raises(AssertionError, match="passes 1 and 2 on gave 2 and 4"):
        inline(graph, wrong, x, 2, like=x)


def test_an_alias_is_not_worth_a_node() -> None:
    graph, x = graph_of(3, 4)
    node = inline(graph, lambda x: torch.ops.aten.alias.default(x.view(torch.int32)) | 0, x, like=x)
    assert [one.target for one in graph.nodes if one.op == "call_function"] == [
        torch.ops.aten.view.dtype,
        torch.ops.aten.bitwise_or.Scalar,
    ]
    assert torch.equal(result(graph, node, torch.ones(3, 4)), torch.ones(3, 4).view(torch.int32))
