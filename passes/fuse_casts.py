"""Make the casts of quantizes single operations."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.cast_blocks import cast_blocks_op
from fp8_compile.kernels.formats import BY_DTYPE

from .emit import emit, value
from .graph_pass import GraphPass, PassReport
from .lower_quantizes import CAST

aten = torch.ops.aten


class FuseCasts(GraphPass):
    """Replace the marked ops of a cast, once the graph is split, with the op that has a lowering of its own.

    Before:  q = convert_element_type(clamp(convert_element_type(x, float32) * spread(s), -448, 448), float8_e4m3fn)
    After:   q = fp8_compile.cast_blocks(x, s, float8_e4m3fn, [1, 128])
    """

    def run(self, graph: fx.Graph) -> PassReport:
        casts = [node for node in graph.nodes if _is_ours(node) and value(node).dtype in BY_DTYPE]
        for node in casts:
            with graph.inserting_before(node):
                x, scale = _inputs(node)
                node.replace_all_uses_with(emit(graph, cast_blocks_op, x, scale, *node.meta["fp8_arguments"], like=node))
            graph.erase_node(node)
        return PassReport(len(casts), "casts made one operation")


def _is_ours(node: fx.Node) -> bool:
    mine = node.op == "call_function" and node.meta.get("fp8_kind") == CAST and "fp8_delayed" not in node.meta
    return mine and isinstance(value(node), torch.Tensor)


def _inputs(q: fx.Node) -> tuple[fx.Node, fx.Node]:
    """x and quant_scale, a scale a block."""
    node = q
    while node.target is not aten.mul.Tensor:
        node = node.args[0]  # type: ignore[assignment]
    x, scale = node.args
    while _is_ours(x):
        x = x.args[0]
    while _is_ours(scale):
        scale = scale.args[0]
    return x, scale
