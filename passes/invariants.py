"""What holds for a graph between two passes of ours.

Tests check it after every pass, and so does any compilation with ``FP8_COMPILE_CHECK=1`` in the environment. Other
compilations don't, to save time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

from torch import fx

from .graph.marks import Kind, mark_of, marked

VARIABLE = "FP8_COMPILE_CHECK"


def are_checked() -> bool:
    """True if the environment asks for checks."""
    return os.environ.get(VARIABLE, "0") not in ("", "0")


def check_graph(graph: fx.Graph, pass_name: str, gone: Collection[Any]) -> None:
    """Raise an error if the graph is not as passes rely on. ``gone``: operations and kinds that passes have removed."""
    broken = [f"{node.format_node()}: {what}" for node in graph.nodes for what in _broken(node, gone)]
    assert not broken, f"after {pass_name}: " + "; ".join(broken)


def _broken(node: fx.Node, gone: Collection[Any]) -> Iterator[str]:
    """What is wrong with one node."""
    if node.op != "call_function":
        return
    mark = mark_of(node)
    if "val" not in node.meta and node.users:  # torch's own assertions have none, and no one reads them
        yield "it has no value; nodes are made by emit and inline alone"
    if node.target in gone or mark.kind in gone:
        yield "an earlier pass was to remove it"
    if marked(node, Kind.GEMM) and not (mark.site and mark.gemm):
        yield "no matmul of the report is known to be replaced by this FP8 gemm"
    if marked(node, Kind.RELAYOUT) and mark.relayout is None:
        yield "a copy that does not say in which layout"
    if (marked(node, Kind.CAST) or mark.scale is not None) and mark.quantize is None:
        yield "part of a quantize that does not say which"
