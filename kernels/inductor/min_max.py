"""Write the minimum and the maximum of two numbers in Triton with ``tl.where`` (``patches.TABLE["min_max"]``).

    minimum(a, b) = a if a < b or a is NaN else b            a NaN of b is found by the comparison, which is then false

The numbers are those of ``tl.minimum(a, b, tl.PropagateNan.ALL)``; the instructions are others. Graphs without an
operation of ours are left as they are.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.virtualized import V

from fp8_compile.torch_internals import patches

from .our_graphs import is_ours

SPOILED = "PropagateNan.ALL"  # what Triton makes min.NaN and max.NaN of


@patches.extends("min_max", "torch._inductor.codegen.triton.TritonOverrides.minimum")
def _minimum(original: Any, a: Any, b: Any) -> str:
    text: str = original(a, b)
    return f"tl.where(({a} < {b}) | ({a} != {a}), {a}, {b})" if _is_to_change(text) else text


@patches.extends("min_max", "torch._inductor.codegen.triton.TritonOverrides.maximum")
def _maximum(original: Any, a: Any, b: Any) -> str:
    text: str = original(a, b)
    return f"tl.where(({a} > {b}) | ({a} != {a}), {a}, {b})" if _is_to_change(text) else text


def _is_to_change(text: str) -> bool:
    return SPOILED in text and is_ours(V.graph.graph)
