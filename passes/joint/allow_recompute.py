"""Let the partitioner choose whether an FP8 tensor that a backward gemm reads is saved or made again.

The partitioner would save whatever an op that it does not know reads in backward, even where q can be made again from
tensors that are saved anyway: weights, the input of an activation function. A copy that is never saved lets it choose
(``| 0``, because Inductor takes a plain copy out too early). Once the graph is split the copies are forgotten.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.gpu.cublaslt_mm import cublaslt_mm_op

from ..graph.emit import GEMM, NEVER_SAVED, inline
from ..graph_pass import GraphPass, PassReport

KIND = "read again"  # meta["fp8_kind"] of copies that stand for a reading in backward, until the graph is split


class ReadAgain(GraphPass):
    """Put a copy that is never saved before each operand of a backward gemm by cuBLASLt.

    Before:  dw = fp8_compile.cublaslt_mm(permute(g), q, ...)
    After:   dw = fp8_compile.cublaslt_mm(view(view(permute(g), int8) | 0, float8_e5m2), ...)
    """

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=cublaslt_mm_op)
        nodes = [node for node in gemms if node.meta.get("fp8_kind") == GEMM and node.meta["fp8_gemm"] != "output"]
        for node in nodes:
            with graph.inserting_before(node):
                node.args = (*(read_again(graph, q, like=node) for q in node.args[:2]), *node.args[2:])
        return PassReport(len(nodes), "gemms whose operands are saved or made again")


class ForgetCopies(GraphPass):
    """Let gemms read what the copies were made of, once the graph is split.

    Before:  dw = fp8_compile.cublaslt_mm(view(view(permute(g), int8) | 0, float8_e5m2), ...)
    After:   dw = fp8_compile.cublaslt_mm(permute(g), ...)
    """

    def run(self, graph: fx.Graph) -> PassReport:
        return PassReport(forget_copies(graph), "copies that only stood for a reading in backward")


def read_again(graph: fx.Graph, q: fx.Node, *, like: fx.Node) -> fx.Node:
    """q, as a backward gemm is to read it until the graph is split."""
    copy: fx.Node = inline(graph, _copy, q, like=like, tags={"fp8_kind": KIND, **NEVER_SAVED})
    return copy


def _copy(q: torch.Tensor) -> torch.Tensor:
    # Not uint8, as relayouts have it: equal views would become one node, which can't have the marks of both.
    return (q.view(torch.int8) | 0).view(q.dtype)


def forget_copies(graph: fx.Graph) -> int:
    """Put in place of the copies what they were made of; how many there were."""
    copies = [node for node in graph.nodes if _is_copy(node) and not any(map(_is_copy, node.users))]
    for copy in copies:
        q = copy
        while _is_copy(q):
            q = q.args[0]  # type: ignore[assignment]
        copy.replace_all_uses_with(q)
    graph.eliminate_dead_code()
    return len(copies)


def _is_copy(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta.get("fp8_kind") == KIND
