"""Copies of FP8 tensors in a gemm's layout: transposed, or filled up to round sizes.

Until the graph is split a copy is a chain of plain ops with one mark; ``RelayoutBytes`` makes each chain one op.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8_compile.kernels.relayout import relayout

from .emit import NEVER_SAVED, inline
from .marks import Kind, Mark, mark_of, marked

Arguments = tuple[bool, int, int]  # transposed, row_multiple, col_multiple


def emit_relayout(
    graph: fx.Graph,
    q: fx.Node,
    transposed: bool,
    row_multiple: int,
    col_multiple: int,
    *,
    like: fx.Node,
    saved: bool = False,
) -> fx.Node:
    """Add a copy of q as plain ops with a mark.

    Before the graph is split the copy must be made of ops that the partitioner knows to be cheap. Otherwise it would
    save the copy, or q, where backward could compute them again from what is saved anyway. ``saved``: forward makes the
    copy, where it has q at hand, and saves it instead of q.
    """
    arguments = (transposed, row_multiple, col_multiple)
    mark = Mark(kind=Kind.RELAYOUT, relayout=arguments)
    copy: fx.Node = inline(graph, relayout, q, *arguments, like=like, mark=mark, tags={} if saved else NEVER_SAVED)
    if saved:
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return copy


def is_relayout(node: fx.Node) -> bool:
    """True for a node that is part of a copy."""
    return marked(node, Kind.RELAYOUT)


def is_last_of_relayout(node: fx.Node) -> bool:
    """True for the node whose result is the copy."""
    return is_relayout(node) and not any(map(is_relayout, node.users))


def relayout_arguments(node: fx.Node) -> Arguments | None:
    """What the copy that a node is part of was made with; None if it is not part of one."""
    return mark_of(node).relayout if is_relayout(node) else None


def relayouts_of(q: fx.Node, arguments: Arguments) -> list[fx.Node]:
    """The copies of q that were made with these ``arguments`` (``emit_relayout``)."""
    chain = [user for user in q.users if relayout_arguments(user) == arguments]
    for node in chain:
        chain += [user for user in node.users if is_relayout(user)]
    return [node for node in chain if is_last_of_relayout(node)]


def saved_relayouts(graph: fx.Graph) -> list[fx.Node]:
    """The copies that forward is to save."""
    copies = (node for node in graph.nodes if is_relayout(node))
    return [node for node in copies if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]
