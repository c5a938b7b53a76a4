"""Make the copies of FP8 tensors in a gemm's layout single operations."""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8_compile.kernels.relayout import relayout, relayout_op

from .emit import NEVER_SAVED, emit, inline
from .graph_pass import GraphPass, PassReport

KIND = "relayout"


def emit_relayout(
    graph: fx.Graph, q: fx.Node, transposed: bool, row_multiple: int, col_multiple: int, *, like: fx.Node
) -> fx.Node:
    """The copy as plain ops, marked. Before the graph is split it must be made of ops that the partitioner knows
    to be cheap, or it would save the copy, or q, where it could compute them again from what is saved anyway."""
    arguments: tuple[Any, ...] = (transposed, row_multiple, col_multiple)
    tags = {"fp8_kind": KIND, "fp8_relayout": arguments, **NEVER_SAVED}
    return inline(graph, relayout, q, *arguments, like=like, tags=tags)


class RelayoutBytes(GraphPass):
    """Replace the marked ops, once the graph is split, with the op that has a lowering of its own.

    Before:  y = view(clone(permute(view(q, uint8), [1, 0])), float8_e4m3fn)
    After:   y = fp8_compile.relayout(q, transposed=True, 1, 1)
    """

    def run(self, graph: fx.Graph) -> PassReport:
        last = [node for node in graph.nodes if _is_ours(node) and not any(map(_is_ours, node.users))]
        changed = 0
        for node in last:
            if "val" not in node.meta or not hasattr(node.meta["val"], "dtype"):
                continue  # a size, not a tensor
            source = node
            while _is_ours(source):
                source = source.args[0]  # type: ignore[assignment]
            with graph.inserting_before(node):
                node.replace_all_uses_with(
                    emit(graph, relayout_op, source, *node.meta["fp8_relayout"], like=node)
                )
            graph.erase_node(node)
            changed += 1
        return PassReport(changed, "FP8 copies in the gemm's layout")


def _is_ours(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("fp8_kind") == KIND
