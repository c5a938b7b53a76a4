"""Keep Inductor's C++ loop splitting away from loops that it splits differently, or not to their end
(``patches.TABLE["loop_split"]``).

The split is an optimisation. It is left out where the shapes of fused loops differ, and where it would leave a rest.
"""

from __future__ import annotations

from typing import Any

from torch.utils._sympy.functions import FloorDiv

from fp8_compile.torch_internals import patches


@patches.extends("loop_split", "torch._inductor.codegen.cpp.CppScheduling.try_loop_split")
def try_loop_split(self: Any, original: Any, nodes: list[Any]) -> list[Any]:
    """``CppScheduling.try_loop_split`` for loops over equal shapes only, which it can split without a rest."""
    bodies = [node.node.get_default_sizes_body() for node in nodes if hasattr(node.node, "data")]
    shapes = {tuple(sizes[0]) for sizes, *_ in bodies}
    if len(shapes) > 1 or any(_leaves_a_rest(sizes[0], body) for sizes, body, _ in bodies):
        return nodes
    split: list[Any] = original(self, nodes)
    return split


def _leaves_a_rest(sizes: Any, body: Any) -> bool:
    """True if an index is divided by something that its range is not a multiple of."""
    ranges = dict(zip(body.iter_vars, sizes))
    divisions = {one for expr in body.indexing_exprs.values() if hasattr(expr, "find") for one in expr.find(FloorDiv)}
    return any(one.args[0] in ranges and ranges[one.args[0]] % one.args[1] != 0 for one in divisions)
