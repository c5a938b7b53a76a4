"""Turn quantize nodes into the operations that Inductor fuses."""

from __future__ import annotations

import operator

from torch import fx

from fp8_compile.kernels.quantize import quantize, quantize_op

from .emit import inline
from .graph_pass import GraphPass, PassReport

QUANTIZE = {"fp8_kind": "quantize"}  # marks the nodes of a lowered quantize: their casts are in range


class LowerQuantizes(GraphPass):
    """Replace each quantize node with its formula (``kernels/quantize.py``).

    Before:  q, s = fp8_compile.quantize(x, float8_e4m3fn, [-1, -1])
    After:   amax = clamp_min(amax(abs(x)), 1e-12);  quant_scale = reciprocal(amax) * 448
             s = reciprocal(quant_scale) + amax * 0
             q = convert_element_type(clamp(x * quant_scale, -448, 448), float8_e4m3fn)

    Inductor fuses the cast into the producer of x and the amax into the reduction before it.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        nodes = graph.find_nodes(op="call_function", target=quantize_op)
        for node in nodes:
            with graph.inserting_before(node):
                results = inline(graph, quantize, *node.args, like=node, tags=QUANTIZE)
            for user in list(node.users):
                assert user.target is operator.getitem, user.format_node()
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)
        return PassReport(len(nodes), "quantizes lowered")
