"""Let gemms read operands as they lie, on GPUs whose tensor cores take FP8 in any layout."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8_compile.kernels.gpu.cublaslt_mm import cublaslt_mm_op
from fp8_compile.kernels.relayout import relayout_op

from .add_in_gemm import emit_cublaslt_mm
from .emit import GEMM, emit, value
from .graph_pass import GraphPass, PassReport
from .rewrite_matmuls import untransposed

aten = torch.ops.aten

LINE = 16  # bytes that a row must be a multiple of


class ReadAnyLayout(GraphPass):
    """Replace the transposed copy of an operand by the operand, once the graph is split.

    Before:  dw = _scaled_mm(relayout(qdy, transposed=True, 1, 1), permute(qx_t), sdy, sx, out_dtype=bf16)
    After:   dw = fp8_compile.cublaslt_mm(permute(qdy), permute(qx_t), sdy, sx, None, None, bf16)

    Copies that forward makes for backward stay, as do copies that fill up sizes, and gemms with more than one scale a
    tensor, which are other kernels.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        changed = 0
        for gemm in [node for node in graph.nodes if _is_ours(node)]:
            sides = [_as_it_lies(graph, gemm, index) for index in (0, 1)]
            if sides == list(gemm.args[:2]):
                continue
            gemm.args = (*sides, *gemm.args[2:])
            if gemm.target is aten._scaled_mm.default:
                with graph.inserting_before(gemm):
                    gemm.replace_all_uses_with(emit_cublaslt_mm(graph, gemm, added=None))
                graph.erase_node(gemm)
            changed += 1
        return PassReport(changed, "FP8 gemms that read operands as they lie")


def _is_ours(node: fx.Node) -> bool:
    """An FP8 gemm of ours that cuBLASLt could compute."""
    if node.op != "call_function" or node.meta.get("fp8_kind") != GEMM:
        return False
    if node.target is aten._scaled_mm.default:
        plain = node.kwargs.get("bias") is None and node.kwargs.get("scale_result") is None
        return plain and all(value(scale).numel() == 1 for scale in node.args[2:4])  # type: ignore[arg-type]
    return node.target is cublaslt_mm_op


def _as_it_lies(graph: fx.Graph, gemm: fx.Node, index: int) -> fx.Node:
    """An operand of a gemm without the copy that transposes it."""
    operand: fx.Node = gemm.args[index]  # type: ignore[assignment]
    copy, flipped = untransposed(operand)
    if copy.op != "call_function" or copy.target is not relayout_op or copy.args[1:4] != (True, 1, 1):
        return operand
    source: fx.Node = copy.args[0]  # type: ignore[assignment]
    if not statically_known_true(value(source).shape[1] % LINE == 0) or not value(source).is_contiguous():
        return operand
    with graph.inserting_before(gemm):
        return source if flipped else emit(graph, aten.permute.default, source, [1, 0], like=gemm)
