"""Which graphs are ours: what we change in Inductor is left as it is for all others."""

from __future__ import annotations

from torch import fx


def is_ours(graph: fx.Graph) -> bool:
    """True if a graph has an operation of ours."""
    return any(getattr(node.target, "namespace", None) == "fp8_compile" for node in graph.nodes)
