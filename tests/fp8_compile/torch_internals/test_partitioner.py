"""Passes right after the split."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from fp8_compile.torch_internals.partitioner import FIELD, split_and_shrink


class _Halves(CustomPartitionerFn):
    """A user's partitioner, which knows what the halves are."""

    def __init__(self, known: str | None) -> None:
        self.known = known
        self.halves = tuple(fx.symbolic_trace(torch.nn.Identity()) for _ in range(2))

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        return self.halves

    def uuid(self) -> str | None:
        return self.known


def test_both_halves_of_the_users_partitioner_are_shrunk() -> None:
    user, seen = _Halves("user"), list[fx.Graph]()
    partitioner = split_and_shrink(seen.append, "ours", {FIELD: user})[FIELD]
    assert partitioner(user.halves[0], ()) == user.halves
    assert seen == [half.graph for half in user.halves]


def test_key_of_the_caches_has_both_parts_and_is_all_that_is_pickled() -> None:
    both = split_and_shrink(print, "ours", {FIELD: _Halves("user")})[FIELD]
    assert both.uuid() == "oursuser" == pickle.loads(pickle.dumps(both))
    assert split_and_shrink(print, "ours", {FIELD: _Halves(None)})[FIELD].uuid() is None
    assert split_and_shrink(print, "ours", {})[FIELD].uuid() == "ours"


def test_nothing_runs_early_without_a_key() -> None:
    assert split_and_shrink(print, None, {}) == {}
