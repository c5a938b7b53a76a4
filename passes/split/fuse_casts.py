"""Make the casts of quantizes single operations."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.cast_blocks import cast_blocks_op
from fp8_compile.kernels.formats import BY_DTYPE

from ..graph.arguments import arguments
from ..graph.emit import emit, value
from ..graph.marks import Kind, mark_of, marked, quantize_of, source_through
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten


class FuseCasts(GraphPass):
    """Replace the marked ops of a cast, once the graph is split, with the op that has a lowering of its own.

    Before:  q = convert_element_type(clamp(convert_element_type(x, float32) * spread(s), -448, 448), float8_e4m3fn)
    After:   q = fp8_compile.cast_blocks(x, s, float8_e4m3fn, [1, 128])
    """

    def run(self, graph: fx.Graph) -> PassReport:
        changed = 0
        for node in [node for node in graph.nodes if _is_ours(node) and value(node).dtype in BY_DTYPE]:
            product = source_through(node, lambda one: _is_ours(one) and one.target is not aten.mul.Tensor)
            if not _is_ours(product):
                continue  # forward saved a value from the middle
            # x before its cast to FP32, and the scales before they are spread over their blocks.
            inputs = [source_through(side, _is_ours) for side in arguments(product)]
            with graph.inserting_before(node):
                q = emit(graph, cast_blocks_op, *inputs, *quantize_of(node), like=node)
            node.replace_all_uses_with(q)
            graph.erase_node(node)
            changed += 1
        return PassReport(changed, "casts made one operation")


def _is_ours(node: fx.Node) -> bool:
    mine = marked(node, Kind.CAST) and mark_of(node).delayed is None
    return mine and isinstance(value(node), torch.Tensor)
