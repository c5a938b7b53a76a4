"""Keep Inductor's C++ loop splitting away from loops that it splits differently.

Symptom: ``AssertionError: ({y0: 512, y1: 8, y2: 128}, {y0: 1024, y1: 4, y2: 128})`` in ``CppScheduling.try_loop_split``
when a blockwise model is compiled for a CPU. Cause: two fused loops over tensors of one number of elements and
different shapes both divide an index by 128, the size of a block; each is split by itself, and then they must be alike
(torch 2.13). The split is an optimisation: where shapes differ it is left out. This can go when Inductor checks that.
"""

from __future__ import annotations

from torch._inductor.codegen.cpp import CppScheduling

_split = CppScheduling.try_loop_split


def try_loop_split(self, nodes):  # type: ignore[no-untyped-def]
    """``CppScheduling.try_loop_split`` for loops over equal shapes only."""
    shapes = {tuple(node.node.get_default_sizes_body()[0][0]) for node in nodes if hasattr(node.node, "data")}
    return nodes if len(shapes) > 1 else _split(self, nodes)


def install() -> None:
    """Put it in place of Inductor's, once."""
    CppScheduling.try_loop_split = try_loop_split  # type: ignore[method-assign]
