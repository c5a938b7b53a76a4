"""Read weights from the FP8 copies that the model keeps of them."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.delayed_scaling import DEQUANT
from fp8_compile.kernels.quantize import quantize_op
from fp8_compile.torch_internals.aot import input_number

from ..graph.arguments import arguments, input_of
from ..graph.cached_weights import CODES, SCALES, TRANSPOSED, CachedWeights, Use, weight_input, weight_inputs
from ..graph.emit import inline, replace_results
from ..graph.marks import mark_of
from ..graph.relayouts import relayouts_of
from ..graph.roles import Role
from ..graph.views import is_call_of
from ..graph_pass import GraphPass, PassReport

prims = torch.ops.prims


class UseWeightCache(GraphPass):
    """Replace the quantize of a weight, and copies of the result in another layout, by inputs that hold them.

    Before:  qw, sw = fp8_compile.quantize(w, float8_e4m3fn, [-1, -1])
             qw_t = view(clone(permute(view(qw, uint8), [1, 0])), float8_e4m3fn)          where K must be contiguous
    After:   qw = fp8_weight_3_codes;  sw = fp8_weight_3_scales[1];  qw_t = fp8_weight_3_transposed

    Skips: operands that are neither a parameter as it is nor one rounded by autocast; parameters that the cache has no
    copy of. A copy filled up to round sizes is still made from the codes.
    """

    def __init__(self, weights: CachedWeights) -> None:
        self.weights = weights

    def run(self, graph: fx.Graph) -> PassReport:
        buffers = weight_inputs(graph)
        used = 0
        for node in graph.find_nodes(op="call_function", target=quantize_op):
            tensor = mark_of(node).use
            source, via = _unrounded(input_of(node))
            argument = _argument(source)
            if tensor is None or tensor.role is not Role.WEIGHT or weight_input(argument, CODES) not in buffers:
                continue
            if self.weights.use(Use(argument, tensor, via)):
                _replace(graph, node, argument, buffers)
                used += 1
        return PassReport(used, "weights read from the cache")


def _replace(graph: fx.Graph, node: fx.Node, argument: int, buffers: dict[str, fx.Node]) -> None:
    codes, transposed = buffers[weight_input(argument, CODES)], buffers.get(weight_input(argument, TRANSPOSED))
    with graph.inserting_before(node):
        dequant_scale = inline(graph, _dequant_scale, buffers[weight_input(argument, SCALES)], like=node)
    if transposed is not None:
        for copy in [copy for part in node.users for copy in relayouts_of(part, (True, 1, 1))]:
            copy.replace_all_uses_with(transposed)
    replace_results(graph, node, (codes, dequant_scale))


def _dequant_scale(scales: torch.Tensor) -> torch.Tensor:
    return scales[DEQUANT].view(1, 1)


def _unrounded(node: fx.Node) -> tuple[fx.Node, torch.dtype | None]:
    """The tensor before a cast to another dtype, and that dtype; without a cast, the node itself."""
    if is_call_of(node, (prims.convert_element_type.default,)):
        source, dtype = arguments(node)
        return source, dtype
    return node, None


def _argument(node: fx.Node) -> int:
    """Which argument of the Dynamo graph a placeholder is, or is the local part of; -1 if it is not an argument."""
    index = input_number(node) if node.op == "placeholder" else None
    return -1 if index is None else index
