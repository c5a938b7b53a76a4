"""Run FP8 gemms on a CPU: upcast exactly, multiply in FP32, scale."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import fx

from fp8_compile.kernels.cpu.ops import scaled_product_op
from fp8_compile.kernels.scaled_mm import epilogue, has_tiles, operands

from .emit import GEMM, NEVER_SAVED, emit, inline, value
from .find_matmuls import root_of
from .graph_pass import GraphPass, PassReport
from .rewrite_matmuls import untransposed

aten, prims = torch.ops.aten, torch.ops.prims


class LowerScaledMmForCpu(GraphPass):
    """Replace ``aten._scaled_mm``, which is a reference loop on CPUs, with an exact FP32 product.

    Before:  y: bf16[M, N] = _scaled_mm(qa, qb, sa, sb, bias, out_dtype=bf16)
    After:   y = fp8_compile.scaled_product(float(qa), float(qb), sa, sb, bias, bf16)
    Tiles:   y = convert_element_type(mm(float(qa) * sa, float(qb) * sb) + bias, bf16)

    FP8 values are exact in FP32 and so are their products; only the sum rounds, as on a GPU.
    Upcasts that backward reads too are never saved for it: the FP8 tensors are, at a quarter of the bytes.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
        nodes = [node for node in gemms if node.meta.get("fp8_kind") == GEMM]
        read_in_backward = {root_of(q) for node in nodes if node.meta["fp8_gemm"] != "output" for q in node.args[:2]}
        for node in nodes:
            never_saved = bool({root_of(q) for q in node.args[:2]} & read_in_backward)
            tags = NEVER_SAVED if never_saved else {}
            if never_saved:
                _never_save_twins(node)
            with graph.inserting_before(node):
                result = _tiled(graph, node, tags) if _has_tiles(node) else _product(graph, node, tags)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        return PassReport(len(nodes), "FP8 gemms lowered for the CPU")


def _never_save_twins(node: fx.Node) -> None:
    """Statistics upcast, too: the partitioner merges equal nodes, and the tag of the first one is what counts."""
    for q in node.args[:2]:
        for twin in untransposed(q)[0].users:  # type: ignore[arg-type]
            if twin.target is prims.convert_element_type.default and twin.args[1] is torch.float32:
                twin.meta.update(NEVER_SAVED)


def _product(graph: fx.Graph, node: fx.Node, tags: Mapping[str, Any]) -> fx.Node:
    upcast = prims.convert_element_type.default
    left, right = (emit(graph, upcast, q, torch.float32, like=node, tags=tags) for q in node.args[:2])
    bias, out_dtype = node.kwargs["bias"], node.kwargs["out_dtype"]
    tags = {"recompute": node.meta["recompute"]} if "recompute" in node.meta else {}
    return emit(graph, scaled_product_op, left, right, *node.args[2:4], bias, out_dtype, like=node, tags=tags)


def _tiled(graph: fx.Graph, node: fx.Node, tags: Mapping[str, Any]) -> fx.Node:
    q_left, q_right, *scales = node.args[:4]
    left, right = inline(graph, operands, q_left, q_right, *scales, like=node, tags=tags)
    product = emit(graph, aten.mm.default, left, right, like=node)
    return inline(graph, epilogue, product, *scales, node.kwargs["bias"], node.kwargs["out_dtype"], like=node)


def _has_tiles(node: fx.Node) -> bool:
    scale_left, scale_right = map(value, node.args[2:4])
    m, n = value(node).shape
    return has_tiles(m, n, scale_left, scale_right)
