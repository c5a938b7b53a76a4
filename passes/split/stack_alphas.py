"""Compute what the gemms of a graph multiply their products by in one kernel."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.delayed_scaling import next_scales_op
from fp8_compile.kernels.stack_products import stack_products_op

from ..graph.arguments import arguments
from ..graph.emit import emit, first_call
from ..graph.marks import Kind, marked
from ..graph.producers import op_tags
from ..graph.views import PARTS, VIEWS
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten

MOST = 32  # products in one kernel, in which each looks for its own among all


class StackAlphas(GraphPass):
    """Compute the products of the scales of both operands of NVFP4 gemms together, once the graph is split.

    Before:  alpha = mul(dequant, dequant');  alpha' = mul(dequant'', dequant''')
    After:   alphas = fp8_compile.stack_products([dequant, dequant''], [dequant', dequant'''])
             alpha = slice(alphas, 0, 0, 1);  alpha' = slice(alphas, 0, 1, 2)

    That is done where all scales are known when the graph begins: from the state, or from inputs. The scale of a tensor
    that is computed from the tensor itself would keep the other gemms waiting.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        order = {node: position for position, node in enumerate(graph.nodes)}
        chains = {node: chain for node in graph.nodes if marked(node, Kind.ALPHA) and (chain := _chain(node, order))}
        alphas = list(chains)
        for first in range(0, len(alphas), MOST):
            _stack(graph, alphas[first : first + MOST], chains, order)
        return PassReport(len(alphas), "products of scales computed together")


def _chain(alpha: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node] | None:
    """What an alpha is computed from, in order; None if a number of it is more than a part of what was there."""
    found = [alpha]
    for node in found:
        if torch.Tag.pointwise not in op_tags(node) and node.target not in VIEWS | PARTS or len(found) > MOST:
            return None
        found += [one for one in node.all_input_nodes if not _is_there(one) and one not in found]
    return sorted(found, key=order.__getitem__)


def _is_there(node: fx.Node) -> bool:
    """True for what is there when the graph begins: inputs, and the table of scales."""
    table = node.target is aten.clone.default and node.args[0].op == "placeholder"  # type: ignore[union-attr]
    return node.op == "placeholder" or node.target is next_scales_op or table


def _stack(
    graph: fx.Graph, alphas: list[fx.Node], chains: dict[fx.Node, list[fx.Node]], order: dict[fx.Node, int]
) -> None:
    needed = {node for alpha in alphas for node in chains[alpha]}
    sources = {one for node in needed for one in node.all_input_nodes if one not in needed and one.op != "placeholder"}
    place = max(sources, key=order.__getitem__).next if sources else first_call(graph)
    copies: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(place):
        for node in sorted(needed - set(alphas), key=order.__getitem__):
            copies[node] = graph.node_copy(node, lambda one: copies.get(one, one))
        left, right = ([copies.get(one, one) for one in side] for side in zip(*map(arguments, alphas)))
        stacked = emit(graph, stack_products_op, left, right, like=alphas[0])
        parts = [emit(graph, aten.slice.Tensor, stacked, 0, i, i + 1, like=alpha) for i, alpha in enumerate(alphas)]
    for alpha, part in zip(alphas, parts):
        alpha.replace_all_uses_with(part)
        graph.erase_node(alpha)
