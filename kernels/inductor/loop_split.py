"""Keep Inductor's C++ loop splitting away from loops that it splits differently (``patches.TABLE["loop_split"]``).

The split is an optimisation: where the shapes of fused loops differ it is left out.
"""

from __future__ import annotations

from typing import Any

from fp8_compile.torch_internals import patches


@patches.extends("loop_split", "torch._inductor.codegen.cpp.CppScheduling.try_loop_split")
def try_loop_split(self: Any, original: Any, nodes: list[Any]) -> list[Any]:
    """``CppScheduling.try_loop_split`` for loops over equal shapes only."""
    shapes = {tuple(node.node.get_default_sizes_body()[0][0]) for node in nodes if hasattr(node.node, "data")}
    split: list[Any] = nodes if len(shapes) > 1 else original(self, nodes)
    return split
