"""Raise the overflow flag inside the kernels that make the gradients, once the graph is split."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.overflow import raise_overflow_op
from fp8_compile.kernels.record_amax import record_amax_op

from ..graph.arguments import arguments
from ..graph.emit import emit
from ..graph.marks import Kind, source_of
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten


class FlagOverflowInPlace(GraphPass):
    """Replace reductions of whole gradients, one or two kernels each, by atomic stores that fuse with their producers.

    Before:  overflow' = fp8_compile.raise_overflow(overflow, [float(amax(abs(dx))), ...]);  copy_(overflow, overflow')
    After:   fp8_compile.record_amax(overflow, dx, 0)                              one for each gradient
    """

    leaves_no = (raise_overflow_op,)

    def run(self, graph: fx.Graph) -> PassReport:
        nodes = graph.find_nodes(op="call_function", target=raise_overflow_op)
        for node in nodes:
            overflow, magnitudes = arguments(node)
            for magnitude in magnitudes:
                gradient = source_of(magnitude, Kind.OVERFLOW)
                with graph.inserting_before(node):
                    emit(graph, record_amax_op, overflow, gradient, 0, like=node)
            for copy in [user for user in node.users if user.target is aten.copy_.default]:
                graph.erase_node(copy)
            graph.erase_node(node)
        return PassReport(len(nodes), "overflow flags raised in place")
