"""Plans, which are a model of the zoo and a sequence of operations on it: how they are drawn, and carried out."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

import torch
from hypothesis import strategies as st
from operations import Operation, sequences
from sequence_run import SequenceRun
from subject import Subject
from zoo import ENTRIES, ZOO

from fp8_compile import Config


@dataclasses.dataclass(frozen=True)
class Plan:
    """``dynamic``: compiled for all numbers of tokens at once. ``recompiling``: may attach, and may forget code.
    ``target``: what the graphs are made for; those for a GPU are interpreted on the CPU."""

    model: str
    operations: tuple[Operation, ...]
    adam: bool = False
    dynamic: bool = False
    recompiling: bool = False
    target: str = "cpu"


def plans(
    models: Sequence[str] = tuple(ZOO), *, targets: Sequence[str] = ("cpu",), recompiling: bool = False
) -> st.SearchStrategy[Plan]:
    def of(model: str) -> st.SearchStrategy[Plan]:
        operations = sequences(ENTRIES.get(model, 1), recompiling=recompiling).map(tuple)
        dynamic = st.booleans() if model in DYNAMIC else st.just(False)
        target = st.sampled_from(targets)
        return st.builds(Plan, st.just(model), operations, st.booleans(), dynamic, st.just(recompiling), target)

    return st.sampled_from(models).flatmap(of)


# Batch sizes, grad modes and inputs with and without gradients each have a graph. At its limit Dynamo would run the
# model uncompiled, which a comparison with FP8 does not find.
GRAPHS = {"recompile_limit": 1024, "accumulated_recompile_limit": 8192}
DYNAMIC = ("NormMlp", "RawAcrossBreak")  # the rest become dynamic by themselves, at their second number of tokens


class Subjects:
    """Models that are compiled when they are first asked for, and stay compiled."""

    def __init__(self, new_backend: Callable[[Config], Any]) -> None:
        self._new_backend = new_backend
        self._made: dict[Plan, Subject] = {}

    def run(self, plan: Plan) -> SequenceRun:
        key = dataclasses.replace(plan, operations=(), adam=False)
        with torch._dynamo.config.patch(GRAPHS):
            if key not in self._made:
                backend = self._new_backend(Config(target=plan.target))
                self._made[key] = Subject(plan.model, backend, dynamic=plan.dynamic or None)
            run = SequenceRun(self._made[key], adam=plan.adam)
            run.run(plan.operations)
        return run
