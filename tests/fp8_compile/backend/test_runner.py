"""Which code of a graph runs when: warming, looking, compiled."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch

from fp8_compile.backend.runner import FIRST_RUNS, Runner
from fp8_compile.kernels.delayed_scaling import ABSENT
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.slot import FORWARD, TensorUse
from fp8_compile.passes.joint.delay_scales import UpdateRule
from fp8_compile.scaling.graph_slots import GraphSlots
from fp8_compile.scaling.layout import Prefix, layout_of
from fp8_compile.scaling.state import ScalingState
from fp8_compile.scaling.table import TableKind


class Graph:
    """A graph with one slot, whose codes say what they are called and record an amax."""

    def __init__(self, warmup_steps: int = 0) -> None:
        self.state, self.amax = ScalingState(), ABSENT
        kind = TableKind(FORWARD, torch.device("cpu"), 4, 448.0, UpdateRule())
        slots = GraphSlots(layout_of(None, "", [kind]), self.state, Prefix(""), room=1)
        slots.place(TensorUse("up", "up.weight", "", 0, Role.INPUT, None, 0))
        bound = slots.bound(self.state, Prefix(""))
        (place,) = bound.places.values()
        self.table, self.row = self.state.tables[place.table], place.row
        self.run = Runner(
            self.code("compiled"),
            self.state,
            bound,
            trains=True,
            looking=self.code("looking"),
            warming=self.code("warming") if warmup_steps else None,
            warmup_steps=warmup_steps,
        )

    def code(self, name: str) -> Callable[..., str]:
        def run(*args: Any) -> str:
            self.state.settle()  # as the code of a graph does
            self.table.amaxes[self.row] = self.amax
            return name

        return run


def test_a_graph_looks_until_its_slots_have_a_history_and_again_when_it_is_forgotten() -> None:
    graph = Graph()
    assert [graph.run(), graph.run()] == ["looking"] * 2
    graph.amax = 3.0
    assert [graph.run(), graph.run(), graph.run()] == ["looking", "compiled", "compiled"]
    graph.state.reset()
    assert [graph.run(), graph.run()] == ["looking", "compiled"]


def test_a_slot_that_stays_zero_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    graph = Graph()
    graph.amax = 0.0
    assert [graph.run() for _ in range(FIRST_RUNS + 1)] == ["looking"] * FIRST_RUNS + ["compiled"]
    assert "up#0.input" in caplog.text and graph.table.scales[0, graph.row] == 1


def test_a_warm_up_comes_first_and_leaves_nothing_to_look_at() -> None:
    graph = Graph(warmup_steps=2)
    graph.amax = 3.0
    assert [graph.run() for _ in range(4)] == ["warming"] * 2 + ["compiled"] * 2
    graph.state.steps = 1  # an optimizer is attached: its steps count
    assert graph.run() == "warming"
    graph.state.steps = 2
    assert graph.run() == "compiled"


def test_what_fills_no_history_while_warming_is_looked_at_afterwards() -> None:
    graph = Graph(warmup_steps=1)
    assert graph.run() == "warming"
    graph.amax = 3.0
    assert [graph.run(), graph.run()] == ["looking", "compiled"]
