"""Call our C++ for what Inductor would generate for a quantize on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8_compile.kernels.cpu.ops import cast_op, decode_op, round_op, scaled_product_op, scales_op
from fp8_compile.kernels.formats import BY_DTYPE
from fp8_compile.kernels.quantize import is_tiled

from .emit import emit, getitem, value
from .graph_pass import GraphPass, PassReport
from .lower_quantizes import CAST, SCALES, source_of_scale

aten, prims = torch.ops.aten, torch.ops.prims

VIEWS = {aten.permute.default, aten.view.default, aten.select.int, aten.slice.Tensor, aten.unsqueeze.default}


class CallCpuKernels(GraphPass):
    """Fuse the ops of a lowered quantize, once the graph is split, into calls of ``kernels/cpu``.

    Before:  q: fp8 = convert_element_type(clamp(x * s, -448, 448), fp8)
             y = fp8_compile.scaled_product(convert_element_type(permute(q), f32), ...)
    After:   r: f32 = fp8_compile.round(x, s)               the values of q, without writing and reading bytes
             y = fp8_compile.scaled_product(permute(r), ...)
             q: fp8 = fp8_compile.cast(x, s)                only where q is saved for backward
             fp8_compile.decode(q)                          where backward reads it

    Tiles (blockwise) stay with Inductor.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        changes = _replace_upcasts(graph) + _replace_casts(graph) + _replace_scales(graph)
        return PassReport(changes, "calls of CPU kernels")


def _replace_upcasts(graph: fx.Graph) -> int:
    """What a gemm reads: rounded in FP32 where q is made in this graph, decoded where it was saved."""
    in_fp32: dict[fx.Node, fx.Node] = {}
    changes = 0
    for gemm in graph.find_nodes(op="call_function", target=scaled_product_op):
        for upcast in dict.fromkeys(gemm.args[:2]):
            if upcast.target is not prims.convert_element_type.default:
                continue
            q, views = _behind_views(upcast.args[0])
            if _kind(q) == CAST and not _is_ours(q, CAST):
                continue
            if q not in in_fp32:
                in_fp32[q] = _rounded(graph, q) if _is_ours(q, CAST) else _decoded(graph, q, like=gemm)
            result = in_fp32[q]
            with graph.inserting_before(gemm):
                for view in reversed(views):
                    result = emit(graph, view.target, result, *view.args[1:], like=gemm)
            gemm.replace_input_with(upcast, result)
            changes += 1
    graph.eliminate_dead_code()
    return changes


def _rounded(graph: fx.Graph, q: fx.Node) -> fx.Node:
    with graph.inserting_before(q):
        return emit(graph, round_op, *_cast_inputs(q), *q.meta["fp8_arguments"], like=q)


def _decoded(graph: fx.Graph, q: fx.Node, like: fx.Node) -> fx.Node:
    with graph.inserting_before(next_call(q)):
        return emit(graph, decode_op, q, like=like)


def _replace_casts(graph: fx.Graph) -> int:
    """What is left of a cast is there for its bytes."""
    changes = 0
    for node in list(graph.nodes):
        if _is_ours(node, CAST) and value(node).dtype in BY_DTYPE:
            with graph.inserting_before(node):
                q = emit(graph, cast_op, *_cast_inputs(node), *node.meta["fp8_arguments"], like=node)
            node.replace_all_uses_with(q)
            changes += 1
    graph.eliminate_dead_code()
    return changes


def _replace_scales(graph: fx.Graph) -> int:
    """Both scales of a quantize come from one call."""
    ends = [node for node in graph.nodes if _is_own_scale(node)]
    sources = [source_of_scale(node) for node in ends]
    calls: dict[Any, fx.Node] = {}
    for node, x in zip(ends, sources):
        key = (x, node.meta["fp8_arguments"])
        if key not in calls:
            with graph.inserting_before(next_call(x)):
                calls[key] = emit(graph, scales_op, x, *node.meta["fp8_arguments"], like=node)
        with graph.inserting_before(next_call(calls[key])):
            node.replace_all_uses_with(getitem(graph, calls[key], node.meta["fp8_scale"]))
    graph.eliminate_dead_code()
    return len(calls)


def _kind(node: fx.Node) -> str | None:
    """Which half of a quantize a node is part of; a placeholder that stands for a saved one is not."""
    return node.meta.get("fp8_kind") if node.op == "call_function" else None


def _is_ours(node: fx.Node, kind: str) -> bool:
    return _kind(node) == kind and not is_tiled(node.meta["fp8_arguments"][1])


def _is_own_scale(node: fx.Node) -> bool:
    """Whether a node is one of the two scales that a tensor gets from itself."""
    return _is_ours(node, SCALES) and "fp8_scale" in node.meta and "fp8_delayed" not in node.meta


def _cast_inputs(q: fx.Node) -> tuple[fx.Node, fx.Node]:
    """x and quant_scale of ``convert_element_type(clamp(x * quant_scale, ...))``."""
    node = q
    while node.target is not aten.mul.Tensor:
        node = node.args[0]  # type: ignore[assignment]
    scale = node.args[1]
    while _kind(node) == CAST:
        node = node.args[0]  # type: ignore[assignment]
    return node, scale  # type: ignore[return-value]


def _behind_views(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node behind a chain of views, and the chain from last to first."""
    views = []
    while node.op == "call_function" and node.target in VIEWS:
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return node, views


def next_call(node: fx.Node) -> fx.Node:
    """Where to insert what reads ``node`` first: right behind it, but never among the placeholders."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node
