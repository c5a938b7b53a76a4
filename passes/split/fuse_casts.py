"""Make the casts of quantizes single operations."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.cast_blocks import cast_blocks_op
from fp8_compile.kernels.formats import BY_DTYPE

from ..graph.emit import emit, value
from ..graph_pass import GraphPass, PassReport
from ..joint.lower_quantizes import CAST

aten = torch.ops.aten


class FuseCasts(GraphPass):
    """Replace the marked ops of a cast, once the graph is split, with the op that has a lowering of its own.

    Before:  q = convert_element_type(clamp(convert_element_type(x, float32) * spread(s), -448, 448), float8_e4m3fn)
    After:   q = fp8_compile.cast_blocks(x, s, float8_e4m3fn, [1, 128])
    """

    def run(self, graph: fx.Graph) -> PassReport:
        changed = 0
        for node in [node for node in graph.nodes if _is_ours(node) and value(node).dtype in BY_DTYPE]:
            product = node
            while _is_ours(product) and product.target is not aten.mul.Tensor:
                product = product.args[0]
            if not _is_ours(product):
                continue  # forward saved a value from the middle
            inputs = map(_behind_marks, product.args)
            with graph.inserting_before(node):
                q = emit(graph, cast_blocks_op, *inputs, *node.meta["fp8_arguments"], like=node)
            node.replace_all_uses_with(q)
            graph.erase_node(node)
            changed += 1
        return PassReport(changed, "casts made one operation")


def _is_ours(node: fx.Node) -> bool:
    mine = node.op == "call_function" and node.meta.get("fp8_kind") == CAST and "fp8_delayed" not in node.meta
    return mine and isinstance(value(node), torch.Tensor)


def _behind_marks(node: fx.Node) -> fx.Node:
    """x before its cast to FP32, or the scales before they are spread over their blocks."""
    while _is_ours(node):
        node = node.args[0]
    return node
