"""Once the graph is split: raise the overflow flag inside the kernels that make the gradients."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.overflow import raise_overflow_op
from fp8_compile.kernels.record_amax import record_amax_op
from fp8_compile.torch_internals import patches

from ..graph.emit import emit
from ..graph_pass import GraphPass, PassReport
from ..joint.scale_loss import OVERFLOW_KIND

aten = torch.ops.aten


class FlagOverflowInPlace(GraphPass):
    """Replace reductions of whole gradients, a kernel or two each, by atomic stores that fuse with their producers.

    Before:  overflow' = fp8_compile.raise_overflow(overflow, [float(amax(abs(dx))), ...]);  copy_(overflow, overflow')
    After:   fp8_compile.record_amax(overflow, dx, 0)                              one for each gradient
    """

    def run(self, graph: fx.Graph) -> PassReport:
        if not patches.active("atomic_max"):  # the reductions stay
            return PassReport(0, "overflow flags raised in place")
        nodes = graph.find_nodes(op="call_function", target=raise_overflow_op)
        for node in nodes:
            overflow, magnitudes = node.args
            for magnitude in magnitudes:  # type: ignore[union-attr]
                with graph.inserting_before(node):
                    emit(graph, record_amax_op, overflow, _gradient_of(magnitude), 0, like=node)  # type: ignore[arg-type]
            for copy in [user for user in node.users if user.target is aten.copy_.default]:
                graph.erase_node(copy)
            graph.erase_node(node)
        return PassReport(len(nodes), "overflow flags raised in place")


def _gradient_of(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and node.meta.get("fp8_kind") == OVERFLOW_KIND:
        node = node.args[0]  # type: ignore[assignment]
    return node
