"""Let the partitioner choose whether an FP8 tensor that a backward gemm reads is saved or made again.

The partitioner would save whatever an op that it does not know reads in backward, even where q can be made again from
tensors that are saved anyway: weights, the input of an activation function. A copy that is never saved lets it choose.
The copy is an op of ours, because Inductor removes a plain one too early; where the partitioner can't be told that it
is cheap, it is ``| 0``. Once the graph is split, ``DropRecomputeCopies`` lets gemms read q itself.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.gpu.cublaslt_mm import cublaslt_mm_op
from fp8_compile.kernels.recompute_copy import recompute_copy_op
from fp8_compile.torch_internals import patches

from ..graph.arguments import arguments
from ..graph.emit import NEVER_SAVED, emit, inline
from ..graph.marks import Kind, Mark, mark_of, marked
from ..graph_pass import GraphPass, PassReport


class AllowRecompute(GraphPass):
    """Put a copy that is never saved before each operand of a backward gemm by cuBLASLt.

    Before:  dw = fp8_compile.cublaslt_mm(permute(g), q, ...)
    After:   dw = fp8_compile.cublaslt_mm(fp8_compile.recompute_copy(permute(g)), ...)
    """

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=cublaslt_mm_op)
        nodes = [node for node in gemms if marked(node, Kind.GEMM) and mark_of(node).gemm != "output"]
        for node in nodes:
            allow_recompute(graph, node)
        return PassReport(len(nodes), "gemms whose operands are saved or made again")


def allow_recompute(graph: fx.Graph, gemm: fx.Node) -> None:
    """Let a backward gemm read copies of its two operands until the graph is split."""
    left, right, *others = arguments(gemm)
    with graph.inserting_before(gemm):
        gemm.args = (recompute_copy(graph, left, like=gemm), recompute_copy(graph, right, like=gemm), *others)


def recompute_copy(graph: fx.Graph, q: fx.Node, *, like: fx.Node) -> fx.Node:
    """The copy of q that a backward gemm reads until the graph is split, or of a tensor that backward quantizes."""
    mark = Mark(kind=Kind.RECOMPUTE_COPY)
    if patches.active("cheap_ops"):
        return emit(graph, recompute_copy_op, q, like=like, mark=mark, tags=NEVER_SAVED)
    copy: fx.Node = inline(graph, _copy, q, like=like, mark=mark, tags=NEVER_SAVED)
    return copy


def _copy(q: torch.Tensor) -> torch.Tensor:
    # Not uint8, as relayouts have it: equal views would become one node, which can't have the marks of both.
    return (q.view(_INTEGERS[q.element_size()]) | 0).view(q.dtype)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
