"""Let GPUs that may have no rowwise gemm find that out when they run it."""

from __future__ import annotations

from torch import fx

from fp8_compile.kernels.gpu.rowwise_mm import rowwise_mm_op

from ..graph.emit import emit, policy_of
from ..graph.fp8_gemm import fp8_gemm, scaled_mm_op
from ..graph.marks import Kind, Mark
from ..graph_pass import GraphPass, PassReport


class AskForRowwise(GraphPass):
    """Replace rowwise gemms on compute capability 12.x by an operation with a second way, once the graph is split.

    Before:  y = _scaled_mm(qa, qb, sa, sb, bias, out_dtype=bf16)             sa: [M, 1], sb: [1, N]
    After:   y = fp8_compile.rowwise_mm(qa, qb, sa, sb, bias, bf16)
    """

    def run(self, graph: fx.Graph) -> PassReport:
        changed = 0
        for node in graph.find_nodes(op="call_function", target=scaled_mm_op):
            gemm = fp8_gemm(node)
            if gemm is None or gemm.can_add:  # a model's own, or one with a scale per tensor
                continue
            operands = (gemm.left, gemm.right, gemm.scale_left, gemm.scale_right, gemm.bias, gemm.out_dtype)
            with graph.inserting_before(node):
                options = {"like": node, "tags": policy_of(node), "mark": Mark(kind=Kind.GEMM)}
                asked = emit(graph, rowwise_mm_op, *operands, gemm.fast_accumulation, **options)
            node.replace_all_uses_with(asked)
            graph.erase_node(node)
            changed += 1
        return PassReport(changed, "rowwise gemms with a second way")
