"""Inductor's C++ loop splitting is left out where fused loops have different shapes, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

from fp8_compile.kernels.inductor import loop_split
from fp8_compile.torch_internals import patches


def node(*shape: int) -> SimpleNamespace:
    body = ((list(shape), []), None, None)
    return SimpleNamespace(node=SimpleNamespace(data=None, get_default_sizes_body=lambda: body))


def split(self: None, nodes: list[SimpleNamespace]) -> list[str]:
    """Stands for Inductor's own function."""
    return [f"split {len(nodes)}"]


def test_it_is_applied() -> None:
    assert patches.active("loop_split")


def test_loops_over_equal_shapes_are_split_by_inductor() -> None:
    assert loop_split.try_loop_split(None, split, [node(512, 1024), node(512, 1024)]) == ["split 2"]


def test_loops_over_different_shapes_stay_as_they_are() -> None:
    nodes = [node(512, 1024), node(1024, 512)]
    assert loop_split.try_loop_split(None, split, nodes) is nodes
