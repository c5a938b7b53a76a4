"""Drop the copies that let the partitioner choose what is saved for backward."""

from __future__ import annotations

from torch import fx

from fp8_compile.torch_internals.graphs import remove_dead_nodes

from ..graph.marks import Kind, marked, source_of
from ..graph_pass import GraphPass, PassReport


class DropRecomputeCopies(GraphPass):
    """Let gemms read what the copies of ``AllowRecompute`` were made of, once the graph is split.

    Before:  dw = fp8_compile.cublaslt_mm(fp8_compile.recompute_copy(permute(g)), ...)
    After:   dw = fp8_compile.cublaslt_mm(permute(g), ...)
    """

    leaves_no = (Kind.RECOMPUTE_COPY,)

    def run(self, graph: fx.Graph) -> PassReport:
        copies = [node for node in graph.nodes if _is_copy(node) and not any(map(_is_copy, node.users))]
        for copy in copies:
            copy.replace_all_uses_with(source_of(copy, Kind.RECOMPUTE_COPY))
        remove_dead_nodes(graph)
        return PassReport(len(copies), "copies dropped that let the partitioner choose")


def _is_copy(node: fx.Node) -> bool:
    return marked(node, Kind.RECOMPUTE_COPY)
