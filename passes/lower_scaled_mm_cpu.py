"""Run FP8 gemms on a CPU with our own C++."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op

from .emit import GEMM, NEVER_SAVED, emit, inline
from .graph_pass import GraphPass, PassReport

aten = torch.ops.aten

READ_AGAIN = "read again"  # meta["fp8_kind"] of copies that stand for a reading in backward, until the graph is split


class LowerScaledMmForCpu(GraphPass):
    """Replace ``aten._scaled_mm``, which is a reference loop on CPUs, with the gemm of ``kernels/cpu``.

    Before:  y: bf16[M, N] = _scaled_mm(qa, qb, sa, sb, bias, out_dtype=bf16)
    After:   y: bf16[M, N] = fp8_compile.scaled_mm(qa, qb, sa, sb, bias, bf16)
    Backward:                fp8_compile.scaled_mm(view(view(qa, uint8) | 0, float8_e4m3fn), ...)

    It takes either operand in either layout, and scales of tensors, rows and tiles.

    The partitioner would save whatever an op that it does not know reads in backward, even where q can be made again
    from tensors that are saved anyway: weights, the input of an activation function. A copy that is never saved lets
    it choose (``| 0``, because Inductor takes a plain copy out too early); ``CallCpuKernels`` drops it afterwards.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
        nodes = [node for node in gemms if node.meta.get("fp8_kind") == GEMM]
        for node in nodes:
            tags = {"recompute": node.meta["recompute"]} if "recompute" in node.meta else {}
            with graph.inserting_before(node):
                sides = [_read_again(graph, q, node) if node.meta["fp8_gemm"] != "output" else q for q in node.args[:2]]
                result = emit(
                    graph,
                    scaled_mm_op,
                    *sides,
                    *node.args[2:4],
                    node.kwargs["bias"],
                    node.kwargs["out_dtype"],
                    like=node,
                    tags={"fp8_kind": GEMM, **tags},
                )
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return PassReport(len(nodes), "FP8 gemms lowered for the CPU")


def _read_again(graph: fx.Graph, q: fx.Node, like: fx.Node) -> fx.Node:
    copy: fx.Node = inline(graph, _copy, q, like=like, tags={"fp8_kind": READ_AGAIN, **NEVER_SAVED})
    return copy


def _copy(q: torch.Tensor) -> torch.Tensor:
    return (q.view(torch.uint8) | 0).view(q.dtype)


def forget_copies(graph: fx.Graph) -> int:
    """Let gemms read what the copies were made of."""
    for gemm in (gemms := graph.find_nodes(op="call_function", target=scaled_mm_op)):
        for copy in dict.fromkeys(gemm.args[:2]):
            q = copy
            while q.op == "call_function" and q.meta.get("fp8_kind") == READ_AGAIN:
                q = q.args[0]
            gemm.replace_input_with(copy, q)
    graph.eliminate_dead_code()
    return len(gemms)
