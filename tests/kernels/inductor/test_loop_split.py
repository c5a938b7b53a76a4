"""Inductor's C++ loop splitting is left out where fused loops have different shapes, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch._inductor.codegen.cpp import CppScheduling

from fp8_compile.kernels.cpu import quantize  # noqa: F401  importing the ops installs it
from fp8_compile.kernels.inductor import loop_split


def node(*shape: int) -> SimpleNamespace:
    body = ((list(shape), []), None, None)
    return SimpleNamespace(node=SimpleNamespace(data=None, get_default_sizes_body=lambda: body))


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The nodes that reach Inductor's own function."""
    seen: list[object] = []
    monkeypatch.setattr(loop_split, "_split", lambda self, nodes: seen.extend(nodes) or ["split"])
    return seen


def test_it_is_installed_with_the_cpu_kernels() -> None:
    assert CppScheduling.try_loop_split is loop_split.try_loop_split


def test_loops_over_equal_shapes_are_split_by_inductor(split: list[object]) -> None:
    nodes = [node(512, 1024), node(512, 1024)]
    assert loop_split.try_loop_split(None, nodes) == ["split"] and split == nodes


def test_loops_over_different_shapes_stay_as_they_are(split: list[object]) -> None:
    nodes = [node(512, 1024), node(1024, 512)]
    assert loop_split.try_loop_split(None, nodes) is nodes and not split
