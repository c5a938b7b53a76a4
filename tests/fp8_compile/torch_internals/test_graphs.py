"""Dead nodes are removed as torch removes them, without a look at all others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx
from torch._inductor import config

from fp8_compile.torch_internals.graphs import remove_dead_nodes

aten = torch.ops.aten


def module_with_dead_nodes() -> fx.GraphModule:
    inner = fx.Graph()
    y = inner.placeholder("y")
    inner.call_function(aten.cos.default, (y,))
    inner.output(inner.call_function(aten.sin.default, (y,)))
    graph = fx.Graph()
    x, unused = graph.placeholder("x"), graph.placeholder("unused")
    dead = graph.call_function(aten.cos.default, (x,))
    graph.call_function(aten.neg.default, (graph.call_function(aten.abs.default, (dead,)),))
    graph.call_function(aten.copy_.default, (unused, x))
    graph.call_function(aten.bernoulli.p, (x, 0.5))
    subgraph = graph.get_attr("inner")
    graph.output(graph.call_function(aten.mul.Tensor, (x, x)))
    subgraph.append(graph.call_function(torch.ops.higher_order.invoke_subgraph, (subgraph, "inner", x)))
    return fx.GraphModule({"inner": fx.GraphModule({}, inner)}, graph)


@pytest.mark.parametrize("fallback_random", [False, True])
def test_the_same_nodes_are_removed_as_by_torch(fallback_random: bool) -> None:
    expected = module_with_dead_nodes()
    found = copy.deepcopy(expected)
    before = len(found.graph.nodes)
    for context in (None, torch._guards.TracingContext(None)):
        with torch._guards.tracing(context), config.patch(fallback_random=fallback_random):
            expected.graph.eliminate_dead_code()
            remove_dead_nodes(found.graph)
        assert [node.name for node in found.graph.nodes] == [node.name for node in expected.graph.nodes]
    assert len(found.graph.nodes) < before
    assert [node.name for node in found.inner.graph.nodes] == [node.name for node in expected.inner.graph.nodes]
