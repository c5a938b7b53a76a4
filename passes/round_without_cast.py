"""Spare the CPU a cast to FP8 and back."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.formats import BY_DTYPE, format_of
from fp8_compile.kernels.round_to_fp8 import round_to_fp8

from .emit import emit, inline, value
from .graph_pass import GraphPass, PassReport

aten, prims = torch.ops.aten, torch.ops.prims

VIEWS = {aten.permute.default, aten.view.default, aten.select.int, aten.slice.Tensor, aten.unsqueeze.default}


class RoundWithoutCast(GraphPass):
    """Where a tensor is cast to FP8 and, in the same graph, back to FP32, round it in FP32 instead.

    Before:  q: fp8 = convert_element_type(y, fp8);  a: f32 = convert_element_type(permute(q), f32)
    After:   r: f32 = round_to_fp8(y);               a: f32 = permute(r)

    The values are the same bits (``kernels/round_to_fp8.py``). The FP8 tensor itself stays where it is saved for
    backward; that is why this runs after the graph was split.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        rounded: dict[fx.Node, fx.Node] = {}
        changes = 0
        for node in list(graph.nodes):
            if not _is_upcast(node):
                continue
            cast, views = _origin(node.args[0])
            if cast.target is not prims.convert_element_type.default or cast.meta.get("fp8_kind") != "quantize":
                continue
            if cast not in rounded:
                with graph.inserting_before(cast):
                    rounded[cast] = inline(graph, round_to_fp8, cast.args[0], format_of(value(cast).dtype), like=cast)
            result = rounded[cast]
            with graph.inserting_before(node):
                for view in reversed(views):
                    result = emit(graph, view.target, result, *view.args[1:], like=node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
            changes += 1
        return PassReport(changes, "casts to FP8 and back replaced by rounding")


def _is_upcast(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is not prims.convert_element_type.default:
        return False
    return node.args[1] is torch.float32 and value(node.args[0]).dtype in BY_DTYPE


def _origin(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """The node behind a chain of views, and the chain from last to first."""
    views = []
    while node.op == "call_function" and node.target in VIEWS:
        views.append(node)
        node = node.args[0]
    return node, views
