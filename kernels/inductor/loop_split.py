"""Keep Inductor's C++ loop splitting away from loops that it splits differently, or not to the end.

Symptom: ``AssertionError: ({y0: 512, y1: 8, y2: 128}, {y0: 1024, y1: 4, y2: 128})`` in ``CppScheduling.try_loop_split``
when a blockwise model is compiled for a CPU. Cause: two fused loops over tensors of one number of elements and
different shapes both divide an index by 128, the size of a block; each is split by itself, and then they must be alike
(torch 2.13). The split is an optimisation: where shapes differ it is left out. This can go when Inductor checks that.

Symptom: under ``blockwise`` results are random numbers or NaN where a size is above 128 and no multiple of it. Cause:
a loop of 144 that divides its index by 128 becomes one of ``144 // 128`` times 128, and the last 16 elements are never
written (torch 2.13). Such loops are left alone, too. This can go when Inductor checks that the size can be divided.
"""

from __future__ import annotations

from torch._inductor.codegen.cpp import CppScheduling
from torch.utils._sympy.functions import FloorDiv

_split = CppScheduling.try_loop_split


def try_loop_split(self, nodes):  # type: ignore[no-untyped-def]
    """``CppScheduling.try_loop_split`` for loops over equal shapes only, which it can split without a rest."""
    bodies = [node.node.get_default_sizes_body() for node in nodes if hasattr(node.node, "data")]
    shapes = {tuple(sizes[0]) for sizes, *_ in bodies}
    if len(shapes) > 1 or any(_leaves_a_rest(sizes[0], body) for sizes, body, _ in bodies):
        return nodes
    return _split(self, nodes)


def _leaves_a_rest(sizes, body) -> bool:  # type: ignore[no-untyped-def]
    """Whether an index is divided by something that its range is no multiple of."""
    ranges = dict(zip(body.iter_vars, sizes))
    divisions = {one for expr in body.indexing_exprs.values() if hasattr(expr, "find") for one in expr.find(FloorDiv)}
    return any(one.args[0] in ranges and ranges[one.args[0]] % one.args[1] != 0 for one in divisions)


def install() -> None:
    """Put it in place of Inductor's, once."""
    CppScheduling.try_loop_split = try_loop_split  # type: ignore[method-assign]
