"""Run FP8 gemms on a CPU with our own C++."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.cpu.scaled_grouped_mm import scaled_grouped_mm_op
from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op

from ..graph.arguments import arguments
from ..graph.emit import emit, policy_of
from ..graph.marks import Kind, Mark, mark_of, marked
from ..graph_pass import GraphPass, PassReport
from .allow_recompute import allow_recompute, recompute_copy

aten = torch.ops.aten


class LowerScaledMmForCpu(GraphPass):
    """Replace ``aten._scaled_mm``, which is a reference loop on CPUs, with the gemm of ``kernels/cpu``.

    Before:  y: bf16[M, N] = _scaled_mm(qa, qb, sa, sb, bias, out_dtype=bf16)
    After:   y: bf16[M, N] = fp8_compile.scaled_mm(qa, qb, sa, sb, bias, bf16)
    Backward:                fp8_compile.scaled_mm(fp8_compile.recompute_copy(qa), ...)

    Our gemm takes either operand in either layout, and scales of tensors, rows and tiles. ``allow_recompute.py`` says
    what the copies are for; ``DropRecomputeCopies`` drops them. Gemms of ragged groups are ours already: they get the
    copies and stay as they are otherwise.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
        nodes = [node for node in gemms if marked(node, Kind.GEMM)]
        for node in nodes:
            left, right, scale_left, scale_right = arguments(node)
            with graph.inserting_before(node):
                if mark_of(node).gemm != "output":
                    left, right = (recompute_copy(graph, q, like=node) for q in (left, right))
                operands = (left, right, scale_left, scale_right, node.kwargs["bias"], node.kwargs["out_dtype"])
                mark = Mark(kind=Kind.GEMM)
                result = emit(graph, scaled_mm_op, *operands, like=node, tags=policy_of(node), mark=mark)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        grouped = graph.find_nodes(op="call_function", target=scaled_grouped_mm_op)
        for node in grouped:
            if mark_of(node).gemm != "output":
                allow_recompute(graph, node)
        return PassReport(len(nodes) + len(grouped), "FP8 gemms lowered for the CPU")
