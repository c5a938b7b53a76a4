"""Quantize a tensor once, however many gemms read it."""

from __future__ import annotations

import operator
from typing import Any, Hashable

import torch
from torch import fx

from fp8_compile.kernels.fp8_inputs import quantize_inputs_op
from fp8_compile.kernels.quantize import quantize_op

from ..graph.views import LOOK_THROUGH
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten

QUANTIZES = (quantize_op, quantize_inputs_op)
SHARED_OPS = {
    *QUANTIZES,
    operator.getitem,
    aten.select.int,
    aten.slice.Tensor,
    aten.constant_pad_nd.default,
    aten.view.dtype,
    *LOOK_THROUGH,
}


class ShareQuantizes(GraphPass):
    """Merge quantizes of one tensor in one format and blocking, seen through equal views and casts.

    Before:  q1, s1 = quantize(view(x));  q2, s2 = quantize(view(x))       q and k projections of one x
    After:   q1, s1 = quantize(view(x))                                    both gemms read q1

    A backward gemm reads the forward's quantized tensor, which is what makes FP8 the thing saved for backward. Where
    it reads the very bytes that forward writes (``meta["fp8_reads_forwards"]``), these are to be saved, and what they
    are made from is not read again (``meta["fp8_saved"]``).
    """

    def run(self, graph: fx.Graph) -> PassReport:
        first: dict[Hashable, fx.Node] = {}
        merged = 0
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in SHARED_OPS:
                continue
            key, region = _key(node), node.meta.get("ac_graph_id")
            # A region shares with itself; what belongs to none (backward) shares with the first there was.
            kept = first.setdefault((key, region), node) if region is not None else first.get(key, node)
            first.setdefault(key, node)
            if kept is not node:
                if node.meta.get("fp8_reads_forwards") and "recompute" not in kept.meta:
                    kept.meta["fp8_saved"] = True
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
                merged += node.target in QUANTIZES
        return PassReport(merged, "quantizes shared")


def _key(node: fx.Node) -> Hashable:
    return node.target, _frozen(node.args), _frozen(node.kwargs)


def _frozen(item: Any) -> Hashable:
    if isinstance(item, dict):
        return tuple((name, _frozen(value)) for name, value in sorted(item.items()))
    if isinstance(item, (list, tuple)):
        return tuple(map(_frozen, item))
    if isinstance(item, torch.SymInt):
        return str(item)
    return (type(item), item) if isinstance(item, (bool, int, float)) else item
