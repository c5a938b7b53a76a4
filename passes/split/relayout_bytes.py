"""Make the copies of FP8 tensors in a gemm's layout single operations."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from fp8_compile.kernels.relayout import relayout, relayout_op
from fp8_compile.torch_internals.inductor import unroll_threshold

from ..graph.emit import NEVER_SAVED, emit, inline, value
from ..graph.views import root_of
from ..graph_pass import GraphPass, PassReport
from ..joint.lower_quantizes import is_scale

KIND = "relayout"
MOST_SOURCES = 64  # how far back to look for where a tensor comes from


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
    """The copy as plain ops, marked. Before the graph is split it must be made of ops that the partitioner knows
    to be cheap, or it would save the copy, or q, where it could compute them again from what is saved anyway.
    ``saved``: forward makes the copy, where it has q at hand, and saves it instead of q."""
    arguments: tuple[Any, ...] = (transposed, row_multiple, col_multiple)
    tags = {"fp8_kind": KIND, "fp8_relayout": arguments}
    copy: fx.Node = inline(graph, relayout, q, *arguments, like=like, tags=tags if saved else {**tags, **NEVER_SAVED})
    if saved:
        copy.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return copy


def saved_relayouts(graph: fx.Graph) -> list[fx.Node]:
    """The copies that forward is to save."""
    nodes = (node for node in graph.nodes if _is_ours(node))
    return [node for node in nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE]


def relayouts_of(q: fx.Node, arguments: tuple[Any, ...]) -> list[fx.Node]:
    """The copies of q that were made with these ``arguments`` (``emit_relayout``)."""
    chain = [user for user in q.users if _is_ours(user) and user.meta["fp8_relayout"] == arguments]
    for node in chain:
        chain += [user for user in node.users if _is_ours(user)]
    return [node for node in chain if not any(map(_is_ours, node.users))]


def relayout_arguments(node: fx.Node) -> tuple[Any, ...] | None:
    """What a node's copy was made with: transposed, row_multiple, col_multiple; None if it is not part of one."""
    return node.meta["fp8_relayout"] if _is_ours(node) else None


def made_by_reduction(node: fx.Node) -> bool:
    """Whether a node is computed, element by element, from a reduction of its own row: a norm's output is."""
    return not all(map(_is_unrolled, reductions_behind(node)))


def reductions_behind(node: fx.Node) -> list[fx.Node]:
    """The reductions that a node is computed from, element by element."""
    sources = (one.args[0] if one.target is operator.getitem else one for one in pointwise_sources(node))
    return [one for one in sources if torch.Tag.reduction in _op_tags(one)]  # type: ignore[arg-type, misc]


def made_pointwise(node: fx.Node) -> bool:
    """Whether a node is computed element by element from tensors that are in memory: an activation's output is."""
    sources = pointwise_sources(node)
    return len(sources) > 1 and not made_by_reduction(node)


def pointwise_sources(node: fx.Node) -> list[fx.Node]:
    """A node, without its views and casts, and the nodes it is computed from element by element, scales aside: these
    are there before the kernel starts."""
    found: dict[fx.Node, None] = {root_of(node): None}
    for one in (pending := list(found)):
        if torch.Tag.pointwise not in _op_tags(one) or len(found) > MOST_SOURCES:
            continue
        arguments = [root_of(arg) for arg in one.all_input_nodes if not is_scale(arg)]
        new = [arg for arg in arguments if arg not in found]
        found.update(dict.fromkeys(new))
        pending += new
    return list(found)


def _is_unrolled(reduction: fx.Node) -> bool:
    """Of few elements, as of the heads that share a key, Inductor makes a pointwise sum."""
    read, written = value(reduction.args[0]), value(reduction)  # type: ignore[arg-type]
    written = written if isinstance(written, torch.Tensor) else written[0]
    return statically_known_true(read.numel() <= unroll_threshold() * written.numel())


def _op_tags(node: fx.Node) -> Any:
    return getattr(node.target, "tags", ()) if node.op == "call_function" else ()


class RelayoutBytes(GraphPass):
    """Replace the marked ops, once the graph is split, with the op that has a lowering of its own.

    Before:  y = view(clone(permute(view(q, uint8), [1, 0])), float8_e4m3fn)
    After:   y = fp8_compile.relayout(q, transposed=True, 1, 1, separate=False)
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
            # The kernel of a norm goes along rows: a transposed store from there would scatter single bytes.
            arguments = (*node.meta["fp8_relayout"], made_by_reduction(source))
            with graph.inserting_before(node):
                node.replace_all_uses_with(emit(graph, relayout_op, source, *arguments, like=node))
            graph.erase_node(node)
            changed += 1
        return PassReport(changed, "FP8 copies in the gemm's layout")


def _is_ours(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("fp8_kind") == KIND
