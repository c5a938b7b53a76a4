"""Quantize and find the amax in one call of our C++ on a CPU."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.cpu.quantize import cast_op, quantize_delayed_op
from fp8_compile.kernels.delayed_scaling import DEQUANT, QUANT

from ..graph.arguments import input_of
from ..graph.emit import emit, getitem
from ..graph.marks import AMAX, Kind, mark_of, marked, quantize_of, source_of
from ..graph_pass import GraphPass, PassReport
from .call_cpu_kernels import next_call

aten = torch.ops.aten


class FuseDelayedQuantizes(GraphPass):
    """Make one call of the ops that a delayed quantize consists of.

    Before:  amax = amax(abs(x));  used = where(scale > 0, scale, 448 / amax);  s = 1 / used
             q = fp8_compile.cast(x, used)
    After:   q, used, s, amax = fp8_compile.quantize_delayed(x, scale)         q only where it is used

    Where backward makes a forward tensor again, nothing reads its amax, and nothing is fused.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        parts: dict[int, dict[int, fx.Node]] = {}
        for node in graph.nodes:
            mark = mark_of(node)
            if marked(node, Kind.SCALES) and mark.delayed is not None and mark.scale is not None:
                parts.setdefault(mark.delayed, {})[mark.scale] = node
        whole = [part for part in parts.values() if AMAX in part and QUANT in part]
        for part in whole:
            _fuse(graph, part)
        return PassReport(len(whole), "delayed quantizes fused")


def _fuse(graph: fx.Graph, part: dict[int, fx.Node]) -> None:
    used, amax = part[QUANT], part[AMAX]
    assert used.target is aten.where.self, used.format_node()
    x, given = source_of(amax, Kind.SCALES), input_of(used, 1)  # where(given > 0, given, own)
    casts = [user for user in used.users if user.target is cast_op and user.args[0] is x]
    dtype, _ = quantize_of(used)
    with graph.inserting_before(next_call(max(x, given))):  # nodes are compared by their place in the graph
        all_of_it = emit(graph, quantize_delayed_op, x, given, dtype, bool(casts), like=used)
        q, *scales = (getitem(graph, all_of_it, index) for index in range(4))
    for cast in casts:
        cast.replace_all_uses_with(q)
        graph.erase_node(cast)
    for kind, result in zip((QUANT, DEQUANT, AMAX), scales):
        if kind in part:
            # Not within the formula that it replaces: parts of that come earlier in the graph, and are dead now.
            part[kind].replace_all_uses_with(result, delete_user_cb=lambda user: not marked(user, Kind.SCALES))
