"""Make the copies of FP8 tensors in a gemm's layout single operations."""

from __future__ import annotations

from torch import fx

from fp8_compile.kernels.relayout import relayout_op

from ..graph.emit import emit
from ..graph.marks import Kind, source_of
from ..graph.producers import made_by_reduction
from ..graph.relayouts import is_last_of_relayout, relayout_arguments
from ..graph_pass import GraphPass, PassReport


class RelayoutBytes(GraphPass):
    """Replace the marked ops, once the graph is split, with the op that has a lowering of its own.

    Before:  y = view(clone(permute(view(q, uint8), [1, 0])), float8_e4m3fn)
    After:   y = fp8_compile.relayout(q, transposed=True, 1, 1, separate=False)
    """

    def run(self, graph: fx.Graph) -> PassReport:
        changed = 0
        for node in [node for node in graph.nodes if is_last_of_relayout(node)]:
            if not hasattr(node.meta.get("val"), "dtype"):
                continue  # a size, not a tensor
            source, arguments = source_of(node, Kind.RELAYOUT), relayout_arguments(node)
            assert arguments is not None, node.format_node()
            # The kernel of a norm goes along rows: a transposed store from there would scatter single bytes.
            separate = made_by_reduction(source)
            with graph.inserting_before(node):
                node.replace_all_uses_with(emit(graph, relayout_op, source, *arguments, separate, like=node))
            graph.erase_node(node)
            changed += 1
        return PassReport(changed, "FP8 copies in the gemm's layout")
