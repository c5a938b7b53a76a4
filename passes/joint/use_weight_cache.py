"""Read weights from the FP8 copies that the model keeps of them."""

from __future__ import annotations

import dataclasses
import operator
from typing import Protocol

import torch
from torch import fx

from fp8_compile.kernels.quantize import quantize_op
from fp8_compile.torch_internals.aot import input_number, named_inputs

from ..graph.emit import inline
from ..graph.roles import Role
from ..graph.slot import Place, TensorUse
from ..graph_pass import GraphPass, PassReport
from ..split.relayout_bytes import relayouts_of
from .delay_scales import of_row

prims = torch.ops.prims

PREFIX = "fp8_weight_"
CODES, TRANSPOSED, KNOWN = "codes", "transposed", "known"


@dataclasses.dataclass(frozen=True)
class Use:
    """How a graph reads a weight: ``argument`` is its place among the graph's arguments, ``via`` the dtype it is
    rounded to first (autocast)."""

    argument: int
    tensor: TensorUse
    via: torch.dtype | None


class CachedWeights(Protocol):
    """What the pass asks of the cache; ``fp8_compile.graph_weights`` answers."""

    def use(self, use: Use) -> Place | None:
        """Where the scale of the weight's FP8 copy lies; None: there is no such copy."""
        ...


def weight_buffer(index: int, field: str) -> str:
    """What an FP8 copy is called in a graph; with ``KNOWN``, the scales of a page of them."""
    return f"{PREFIX}{index}_{field}"


class UseWeightCache(GraphPass):
    """Replace the quantize of a weight, and the copies of it in another layout, by buffers that hold them.

    Before:  qw, sw = fp8_compile.quantize(w, float8_e4m3fn, [-1, -1])
             qw_t = view(clone(permute(view(qw, uint8), [1, 0])), float8_e4m3fn)          where K must be contiguous
    After:   qw = fp8_weight_3_codes;  sw = fp8_weight_0_known[1, row];  qw_t = fp8_weight_3_transposed

    Skips: operands that are not a parameter as it is, or rounded by autocast; parameters the cache has no copy of.
    A copy filled up to round sizes is still made from the codes.
    """

    def __init__(self, weights: CachedWeights) -> None:
        self.weights = weights

    def run(self, graph: fx.Graph) -> PassReport:
        buffers = _buffers(graph)
        used = 0
        for node in graph.find_nodes(op="call_function", target=quantize_op):
            tensor: TensorUse = node.meta["fp8_use"]
            source, via = _unrounded(node.args[0])  # type: ignore[arg-type]
            argument = _argument(source)
            if tensor.role is not Role.WEIGHT or weight_buffer(argument, CODES) not in buffers:
                continue
            place = self.weights.use(Use(argument, tensor, via))
            if place is not None:
                known = buffers[weight_buffer(place.table, KNOWN)]
                _replace(graph, node, argument, known, place.row, buffers)
                used += 1
        return PassReport(used, "weights read from the cache")


def _replace(
    graph: fx.Graph, node: fx.Node, argument: int, known: fx.Node, row: int, buffers: dict[str, fx.Node]
) -> None:
    codes, transposed = (buffers.get(weight_buffer(argument, field)) for field in (CODES, TRANSPOSED))
    with graph.inserting_before(node):
        _, dequant_scale = inline(graph, of_row, known, row, like=node)
    for part in list(node.users):
        assert part.target is operator.getitem, part.format_node()
        if part.args[1] == 0 and transposed is not None:
            for copy in relayouts_of(part, (True, 1, 1)):
                copy.replace_all_uses_with(transposed)
        part.replace_all_uses_with((codes, dequant_scale)[part.args[1]])  # type: ignore[index]
        graph.erase_node(part)
    graph.erase_node(node)


def _buffers(graph: fx.Graph) -> dict[str, fx.Node]:
    return {name: node for name, node in named_inputs(graph).items() if name.startswith(PREFIX)}


def _unrounded(node: fx.Node) -> tuple[fx.Node, torch.dtype | None]:
    """The tensor behind a cast to another dtype, and that dtype."""
    if node.op == "call_function" and node.target is prims.convert_element_type.default:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, None


def _argument(node: fx.Node) -> int:
    """Which argument of the Dynamo graph a placeholder stands for, or the local part of; -1: none."""
    index = input_number(node) if node.op == "placeholder" else None
    return -1 if index is None else index
