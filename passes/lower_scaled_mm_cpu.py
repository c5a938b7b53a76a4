"""Run FP8 gemms on a CPU: upcast exactly, multiply in FP32, scale."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.scaled_mm import epilogue, operands

from .emit import NEVER_SAVED, emit, inline
from .graph_pass import GraphPass, PassReport

aten = torch.ops.aten


class LowerScaledMmForCpu(GraphPass):
    """Replace ``aten._scaled_mm``, which is a reference loop on CPUs, with an exact FP32 product.

    Before:  y: bf16[M, N] = _scaled_mm(qa, qb, sa, sb, bias, out_dtype=bf16)
    After:   y = convert_element_type(mm(float(qa), float(qb)) * (sa * sb) + bias, bf16)

    FP8 values are exact in FP32 and so are their products; only the sum rounds, as on a GPU.
    The upcasts are never saved for backward: the FP8 tensors are, at a quarter of the bytes.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        nodes = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
        for node in nodes:
            q_left, q_right, *scales = node.args[:4]
            with graph.inserting_before(node):
                left, right = inline(graph, operands, q_left, q_right, *scales, like=node, tags=NEVER_SAVED)
                product = emit(graph, aten.mm.default, left, right, like=node)
                bias, out_dtype = node.kwargs["bias"], node.kwargs["out_dtype"]
                result = inline(graph, epilogue, product, *scales, bias, out_dtype, like=node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return PassReport(len(nodes), "FP8 gemms lowered for the CPU")
