"""Quantize a tensor once, however many gemms read it."""

from __future__ import annotations

import operator
from typing import Any, Hashable

import torch
from torch import fx

from fp8_compile.kernels.fp8_inputs import quantize_inputs_op
from fp8_compile.kernels.mxfp8 import quantize_mx_op
from fp8_compile.kernels.nvfp4_training import global_scale_op, quantize_nvfp4_op
from fp8_compile.kernels.quantize import quantize_op

from ..graph.marks import mark_of, set_mark
from ..graph.views import LOOK_THROUGH, PARTS
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten

QUANTIZES = (quantize_op, quantize_inputs_op, quantize_mx_op, quantize_nvfp4_op, global_scale_op)
SHARED_OPS = {
    *QUANTIZES,
    operator.getitem,
    aten.constant_pad_nd.default,
    aten.view.dtype,
    *PARTS,
    *LOOK_THROUGH,
}


class ShareQuantizes(GraphPass):
    """Merge quantizes of one tensor in one format and blocking, seen through equal views and casts.

    Before:  q1, s1 = quantize(view(x));  q2, s2 = quantize(view(x))       q and k projections of one x
    After:   q1, s1 = quantize(view(x))                                    both gemms read q1

    A backward gemm reads the forward's quantized tensor, so that FP8 is what is saved for backward. Where it reads the
    very bytes that forward writes (``Mark.reads_forwards``), these are to be saved (``Mark.saved``), and backward does
    not read what they are made from.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        first: dict[Hashable, fx.Node] = {}
        merged = 0
        for node in list(graph.nodes):
            if node.op != "call_function" or node.target not in SHARED_OPS:
                continue
            key, region = _key(node), node.meta.get("ac_graph_id")
            # A checkpointed region shares with itself; what belongs to no region (backward) shares with the first.
            kept = first.setdefault((key, region), node) if region is not None else first.get(key, node)
            first.setdefault(key, node)
            if kept is not node:
                if mark_of(node).reads_forwards and "recompute" not in kept.meta:
                    set_mark(kept, saved=True)
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
