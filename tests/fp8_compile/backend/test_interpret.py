"""A graph that is run as it is finds its own device current, as compiled code does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fp8_compile.backend.interpret import run_uncompiled


@pytest.mark.parametrize("device, expected", [("cuda:1", 1), ("cpu", -1)])
def test_the_graphs_device_is_the_current_one(device: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, and a handle of cuBLASLt belongs to it."""
    current: list[int] = []
    found: list[list[int]] = []

    @contextlib.contextmanager
    def made_current(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(list(current))
        return x + 1

    graph = fx.Graph()
    graph.output((graph.call_function(look, (graph.placeholder("x"),)),))
    with FakeTensorMode():
        example = torch.empty(2, device=device)
    run = run_uncompiled(fx.GraphModule({}, graph), [example])
    monkeypatch.setattr(torch.cuda, "device", made_current)
    assert torch.equal(run([torch.ones(2)])[0], torch.full((2,), 2.0))
    assert found == [[expected]] and not current
