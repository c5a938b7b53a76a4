"""Products with FP8 weights, in plain operations."""

from __future__ import annotations

from torch import fx

from fp8_compile.kernels import fp8_weight

from .emit import inline
from .graph_pass import GraphPass, PassReport


class OpenFp8Products(GraphPass):
    """Replace ``fp8_mm``, which is Python, by the operations that it does: for code that runs without Python.

    Before:  y: bf16[M, N] = fp8_mm(x, codes, scales, bias)
    After:   z: bf16[M, N] = mm(x, permute(convert_element_type(codes, bf16)))
             y: bf16[M, N] = convert_element_type(z * scales + bias, bf16)
    """

    def run(self, graph: fx.Graph) -> PassReport:
        found = graph.find_nodes(op="call_function", target=fp8_weight.mm_op)
        for node in found:
            with graph.inserting_before(node):
                x, codes, scales, bias = node.args
                node.replace_all_uses_with(inline(graph, fp8_weight.product, x, codes, scales, bias, like=node))
            graph.erase_node(node)
        return PassReport(len(found), "products with FP8 weights")
