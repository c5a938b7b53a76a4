"""Minimum and maximum in code for our graphs: without the instructions that make Triton miscompile stores of bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch._inductor.codegen.triton import TritonOverrides
from torch._inductor.virtualized import V

from fp8_compile.kernels.inductor import min_max
from fp8_compile.kernels.overflow import raise_overflow_op

NUMBERS = [-torch.inf, -1.0, -0.0, 0.0, 2.0, torch.inf, torch.nan]


def a_graph(op: object) -> SimpleNamespace:
    graph = fx.Graph()
    graph.call_function(op, (graph.placeholder("x"), []))
    return SimpleNamespace(graph=graph)


def spoiled(a: str, b: str) -> str:
    """What Inductor writes from torch 2.14 on."""
    return f"tl.minimum({a}, {b}, tl.PropagateNan.ALL)"


def test_graphs_of_ours_get_no_propagating_instruction() -> None:
    with V.set_graph_handler(a_graph(raise_overflow_op)):
        assert min_max._minimum(spoiled, "a", "b") == "tl.where((a < b) | (a != a), a, b)"
        for function in (TritonOverrides.minimum, TritonOverrides.maximum):
            assert "PropagateNan" not in function("a", "b")


def test_other_graphs_are_left_as_inductor_has_them() -> None:
    with V.set_graph_handler(a_graph(torch.cat)):
        assert min_max._minimum(spoiled, "a", "b") == spoiled("a", "b")


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_the_expression_is_torchs_for_every_pair_of_numbers(name: str) -> None:
    values = torch.tensor(NUMBERS)
    a, b = values.repeat_interleave(len(NUMBERS)), values.repeat(len(NUMBERS))
    with V.set_graph_handler(a_graph(raise_overflow_op)):
        text = getattr(min_max, f"_{name}")(spoiled, "a", "b")
    found = eval(text, {"tl": torch, "a": a, "b": b})
    torch.testing.assert_close(found, getattr(torch, name)(a, b), rtol=0, atol=0, equal_nan=True)
