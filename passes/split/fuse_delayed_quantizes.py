"""Quantize and find the amax in one call of our C++ on a CPU."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.cpu.quantize import cast_op, quantize_delayed_op
from fp8_compile.kernels.delayed_scaling import DEQUANT, QUANT

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit, getitem
from ..graph.marks import AMAX, Kind, mark_of, marked, quantize_of, source_of
from ..graph_pass import GraphPass, PassReport
from .call_cpu_kernels import next_call

aten = torch.ops.aten
USED = 1  # which result of quantize_delayed the quantize scale is


class FuseDelayedQuantizes(GraphPass):
    """Make one call of the ops that a delayed quantize consists of.

    Before:  _, used, s, amax = fp8_compile.quantize_delayed(x, scale, wanted=False);  q = fp8_compile.cast(x, used)
    or:      amax = amax(abs(x));  used = where(scale > 0, scale, 448 / amax);  s = 1 / used
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
            _call(graph, part)
        joined = sum(_join(graph, call) for call in graph.find_nodes(op="call_function", target=quantize_delayed_op))
        return PassReport(max(len(whole), joined), "delayed quantizes fused")


def _call(graph: fx.Graph, part: dict[int, fx.Node]) -> None:
    """Make one call of amax and scales."""
    used, amax = part[QUANT], part[AMAX]
    assert used.target is aten.where.self, used.format_node()
    x, given = source_of(amax, Kind.SCALES), input_of(used, 1)  # where(given > 0, given, own)
    dtype, _ = quantize_of(used)
    with graph.inserting_before(next_call(max(x, given))):  # nodes are compared by their place in the graph
        call = emit(graph, quantize_delayed_op, x, given, dtype, False, like=used)
        scales = [getitem(graph, call, index) for index in (USED, 2, 3)]
    for kind, result in zip((QUANT, DEQUANT, AMAX), scales):
        if kind in part:
            # Not within the formula that it replaces: parts of that come earlier in the graph, and are dead now.
            part[kind].replace_all_uses_with(result, delete_user_cb=lambda user: not marked(user, Kind.SCALES))


def _join(graph: fx.Graph, call: fx.Node) -> bool:
    """Let the call that finds the amax cast, too, where a cast reads its scale."""
    x, given, dtype, wanted = arguments(call)
    readers = [user for result in call.users if result.args[1] == USED for user in result.users]
    casts = [one for one in readers if one.target is cast_op and one.args[0] is x]
    if wanted or not casts:
        return False
    with graph.inserting_before(call):
        both = emit(graph, quantize_delayed_op, x, given, dtype, True, like=call)
    call.replace_all_uses_with(both)
    graph.erase_node(call)
    with graph.inserting_before(both.next):
        q = getitem(graph, both, 0)
    for cast in casts:
        cast.replace_all_uses_with(q)
        graph.erase_node(cast)
    return True
