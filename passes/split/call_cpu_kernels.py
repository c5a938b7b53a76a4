"""Call our C++ for what Inductor would generate for a quantize on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8_compile.kernels.cpu.quantize import cast_op, scales_op
from fp8_compile.kernels.formats import BY_DTYPE
from fp8_compile.kernels.quantize import is_tiled

from ..graph.emit import emit, getitem, value
from ..graph_pass import GraphPass, PassReport
from ..joint.allow_recompute import forget_copies
from ..joint.lower_quantizes import CAST, SCALES, source_of_scale

aten = torch.ops.aten


class CallCpuKernels(GraphPass):
    """Fuse the ops of a lowered quantize, once the graph is split, into calls of ``kernels/cpu``.

    Before:  amax = clamp_min(amax(abs(x)), 1e-12);  s = reciprocal(amax) * 448;  d = reciprocal(s) + amax * 0
             q: fp8 = convert_element_type(clamp(x * s, -448, 448), fp8)
             dw = fp8_compile.scaled_mm(view(view(permute(g), int8) | 0, fp8), view(view(q, int8) | 0, fp8), ...)
    After:   s, d = fp8_compile.scales(x)
             q: fp8 = fp8_compile.cast(x, s)
             dw = fp8_compile.scaled_mm(permute(g), q, ...)

    Tiles (blockwise) stay with Inductor.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        changes = forget_copies(graph) + _replace_casts(graph) + _replace_scales(graph)
        return PassReport(changes, "calls of CPU kernels")


def _replace_casts(graph: fx.Graph) -> int:
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


def next_call(node: fx.Node) -> fx.Node:
    """Where to insert what reads ``node`` first: right behind it, but never among the placeholders."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node
