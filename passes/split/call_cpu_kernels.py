"""Call our C++ for what Inductor would generate for a quantize on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8_compile.kernels.cpu.quantize import cast_op, scales_op
from fp8_compile.kernels.formats import BY_DTYPE
from fp8_compile.kernels.quantize import is_tiled, quantize_op
from fp8_compile.torch_internals.graphs import remove_dead_nodes

from ..graph.arguments import arguments, input_of, named_arguments
from ..graph.emit import emit, getitem, value
from ..graph.marks import Kind, mark_of, marked, quantize_of, source_of
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten


class CallCpuKernels(GraphPass):
    """Fuse the ops of a lowered quantize, once the graph is split, into calls of ``kernels/cpu``.

    Before:  amax = clamp_min(amax(abs(x)), 1e-12);  s = reciprocal(amax) * 448;  d = reciprocal(s) + amax * 0
             q: fp8 = convert_element_type(clamp(x * s, -448, 448), fp8)
    After:   q, d = fp8_compile.quantize(x)
    or:      s, d = fp8_compile.scales(x)                 where something else reads s, or the cast is in backward
             q: fp8 = fp8_compile.cast(x, s)

    Tiles (blockwise) stay with Inductor.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        _drop_names(graph)
        changes = _replace_casts(graph) + _replace_scales(graph)
        joined = _join(graph)
        return PassReport(changes or joined, "calls of CPU kernels")


def _drop_names(graph: fx.Graph) -> None:
    """Pass all arguments of casts by position, which is the faster call; ``call_cast.py`` says what names were for."""
    for cast in graph.find_nodes(op="call_function", target=cast_op):
        given = named_arguments(cast)
        cast.args, cast.kwargs = tuple(given[name] for name in ("x", "quant_scale", "dtype", "block")), {}


def _replace_casts(graph: fx.Graph) -> int:
    changes = 0
    for node in list(graph.nodes):
        if _is_ours(node, Kind.CAST) and value(node).dtype in BY_DTYPE:
            with graph.inserting_before(node):
                q = emit(graph, cast_op, *_cast_inputs(node), *quantize_of(node), like=node)
            node.replace_all_uses_with(q)
            changes += 1
    remove_dead_nodes(graph)
    return changes


def _replace_scales(graph: fx.Graph) -> int:
    """Make one call for both scales of a quantize."""
    ends = {node: which for node in graph.nodes if (which := _own_scale(node)) is not None}
    sources = [source_of(node, Kind.SCALES) for node in ends]
    calls: dict[Any, fx.Node] = {}
    for (node, which), x in zip(ends.items(), sources):
        key = (x, quantize_of(node))
        if key not in calls:
            with graph.inserting_before(next_call(x)):
                calls[key] = emit(graph, scales_op, x, *quantize_of(node), like=node)
        with graph.inserting_before(next_call(calls[key])):
            node.replace_all_uses_with(getitem(graph, calls[key], which))
    remove_dead_nodes(graph)
    return len(calls)


def _join(graph: fx.Graph) -> int:
    """Make one call of scales and cast, where the cast alone reads the quantize scale."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    count = 0
    for call in graph.find_nodes(op="call_function", target=scales_op):
        results = {result.args[1]: result for result in call.users}
        readers = list(results[0].users) if 0 in results else []
        casts = [one for one in readers if one.target is cast_op and one.args[0] is call.args[0]]
        if len(readers) != 1 or not casts or casts[0].args[2:] != call.args[1:]:
            continue
        (cast,) = casts
        # At the cast: codes are larger than scales, and live no longer than they have to.
        early = 1 in results and any(order[user] < order[cast] for user in results[1].users)
        with graph.inserting_before(call if early else cast):
            joined = emit(graph, quantize_op, *arguments(call), like=cast)
            cast.replace_all_uses_with(getitem(graph, joined, 0))
            if 1 in results:
                results[1].replace_all_uses_with(getitem(graph, joined, 1))
        count += 1
    if count:
        remove_dead_nodes(graph)
    return count


def _is_ours(node: fx.Node, kind: Kind) -> bool:
    return marked(node, kind) and not is_tiled(quantize_of(node)[1])


def _own_scale(node: fx.Node) -> int | None:
    """Which of the two scales that a tensor gets from itself a node is; None if it is neither."""
    return mark_of(node).scale if _is_ours(node, Kind.SCALES) and mark_of(node).delayed is None else None


def _cast_inputs(q: fx.Node) -> tuple[fx.Node, fx.Node]:
    """x and quant_scale of ``convert_element_type(clamp(x * quant_scale, ...))``."""
    product = q
    while product.target is not aten.mul.Tensor:
        product = input_of(product)
    return source_of(product, Kind.CAST), input_of(product, 1)


def next_call(node: fx.Node) -> fx.Node:
    """Where to insert what reads ``node`` first: right after it, but never among the placeholders."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node
