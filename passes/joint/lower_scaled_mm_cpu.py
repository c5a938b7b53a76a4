"""Run FP8 gemms on a CPU with our own C++."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.cpu.scaled_grouped_mm import scaled_grouped_mm_op
from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op

from ..graph.emit import GEMM, emit, policy_of
from ..graph_pass import GraphPass, PassReport
from .allow_recompute import read_again

aten = torch.ops.aten


class LowerScaledMmForCpu(GraphPass):
    """Replace ``aten._scaled_mm``, which is a reference loop on CPUs, with the gemm of ``kernels/cpu``.

    Before:  y: bf16[M, N] = _scaled_mm(qa, qb, sa, sb, bias, out_dtype=bf16)
    After:   y: bf16[M, N] = fp8_compile.scaled_mm(qa, qb, sa, sb, bias, bf16)
    Backward:                fp8_compile.scaled_mm(view(view(qa, int8) | 0, float8_e4m3fn), ...)

    It takes either operand in either layout, and scales of tensors, rows and tiles. What the copies are for:
    ``read_again.py``; ``CallCpuKernels`` drops them. Gemms of ragged groups are ours already and get the copies alone.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
        nodes = [node for node in gemms if node.meta.get("fp8_kind") == GEMM]
        for node in nodes:
            with graph.inserting_before(node):
                sides = list(node.args[:2])
                if node.meta["fp8_gemm"] != "output":
                    sides = [read_again(graph, q, like=node) for q in sides]  # type: ignore[arg-type]
                result = emit(
                    graph,
                    scaled_mm_op,
                    *sides,
                    *node.args[2:4],
                    node.kwargs["bias"],
                    node.kwargs["out_dtype"],
                    like=node,
                    tags={"fp8_kind": GEMM, **policy_of(node)},
                )
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        grouped = graph.find_nodes(op="call_function", target=scaled_grouped_mm_op)
        for node in grouped:
            if node.meta["fp8_gemm"] != "output":
                with graph.inserting_before(node):
                    copies = [read_again(graph, q, like=node) for q in node.args[:2]]  # type: ignore[arg-type]
                node.args = (*copies, *node.args[2:])
        return PassReport(len(nodes) + len(grouped), "FP8 gemms lowered for the CPU")
