"""Record what delayed scaling will need, while the model still runs in high precision."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.fx.node import map_arg

from fp8_compile.kernels.quantize import WHOLE, block_amax

from ..graph.arguments import input_of
from ..graph.emit import emit, inline
from ..graph.roles import Names
from ..graph.rules import Rules
from ..graph.slot import SlotPool, state_of
from ..graph.update_rule import UpdateRule
from ..graph_pass import GraphPass, PassReport
from .delay_scales import TablesInGraph, delayed_nodes
from .rewrite_matmuls import RewriteMatmuls
from .share_quantizes import ShareQuantizes


class RecordAmaxes(GraphPass):
    """Leave every matmul as it is, and record the amaxes of what :class:`RewriteMatmuls` would quantize.

    Before:  y = mm(x, permute(w))
    After:   y = mm(x, permute(w))
             amax = amax(abs(x));  ...
             history', scales', counts', room' = fp8_compile.update_scales(amaxes, history, scales, counts, room)
             amaxes' = fp8_compile.record_amaxes(amaxes, [amax, ...], [row, ...])
             copy_(history, history');  copy_(scales, scales');  ...;  copy_(amaxes, amaxes')

    A copy of the graph is rewritten to find which tensors share a slot.
    """

    def __init__(self, rules: Rules, names: Names, pool: SlotPool, rule: UpdateRule, *, held: bool = False) -> None:
        self.rules, self.names, self.pool, self.rule, self.held = rules, names, pool, rule, held

    def run(self, graph: fx.Graph) -> PassReport:
        state = state_of(graph)
        if not state:
            return PassReport(0, "amaxes recorded")
        rewritten, original = _copy(graph)
        RewriteMatmuls(self.rules, self.names, strict=False).run(rewritten)
        ShareQuantizes().run(rewritten)
        quantizes = delayed_nodes(rewritten)
        tables = TablesInGraph(graph, self.pool, self.rule, state, held=self.held)
        for node in quantizes:
            if (place := tables.place(node)) is None:
                continue
            table, row = place
            x = _here(graph, input_of(node), original)
            with graph.inserting_before(graph.output_node()):
                table.record(row, inline(graph, block_amax, x, [WHOLE, WHOLE], like=x), None)
        for table in tables.tables.values():
            table.finish(stats=False, made=[])
        return PassReport(len(quantizes), "amaxes recorded")


def _copy(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy, and for each of its nodes the one that it was copied from."""
    copies: dict[fx.Node, fx.Node] = {}
    new = fx.Graph()
    output = new.graph_copy(graph, copies)
    new.output(output).meta.update(graph.output_node().meta)
    return new, {copied: node for node, copied in copies.items()}


def _here(graph: fx.Graph, node: fx.Node, original: dict[fx.Node, fx.Node]) -> fx.Node:
    """The node in ``graph`` that a node of the rewritten copy stands for. What the rewrite has made, such as a slice of
    a stack, is made in ``graph`` too."""
    if node not in original:
        args: tuple[Any, ...] = map_arg(node.args, lambda arg: _here(graph, arg, original))
        kwargs: dict[str, Any] = map_arg(node.kwargs, lambda arg: _here(graph, arg, original))
        like = next(iter(arg for arg in args if isinstance(arg, fx.Node)))
        assert callable(node.target), node.format_node()
        with graph.inserting_before(graph.output_node()):
            original[node] = emit(graph, node.target, *args, like=like, **kwargs)
    return original[node]
