"""Note how forward quantizes weights: a packed model has to do the same."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fp8_compile.kernels.formats import E2M1, format_of
from fp8_compile.kernels.mxfp8 import quantize_mx_op
from fp8_compile.kernels.nvfp4_training import global_scale_op, quantize_nvfp4_op
from fp8_compile.kernels.quantize import quantize_op
from fp8_compile.torch_internals.aot import input_number

from ..graph.arguments import arguments, input_of
from ..graph.marks import Kind, mark_of, marked
from ..graph.roles import Role, is_backward
from ..graph.rules import Rules
from ..graph.slot import TensorUse, state_of
from ..graph.views import CASTS, RESHAPES, is_call_of
from ..graph.weight_grid import POWER_BLOCKS, WeightGrid
from ..graph_pass import GraphPass, PassReport

QUANTIZES = (quantize_op, quantize_mx_op, quantize_nvfp4_op)


class NoteGrids(GraphPass):
    """Write down the grid of every weight that a forward product reads; the graph stays as it is.

    Before:  qx, sx = fp8_compile.quantize(x, ...);  qw, sw = fp8_compile.quantize(w, ...)
             y = _scaled_mm(qx, permute(qw), sx, sw)
    After:   the same graph
    Noted:   w is argument 3 and is quantized like that, with the scale of its slot; its input has the slot of x

    It runs after quantizes are shared, so that q, k and v name the slot that their common input has. Skips: weights
    that are not parameters as they are (slices of a stack, products of parameters).
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.grids: list[WeightGrid] = []

    @staticmethod
    def applies(graph: fx.Graph) -> bool:
        """True for a graph that trains."""
        return any(is_backward(node) for node in graph.nodes)

    def run(self, graph: fx.Graph) -> PassReport:
        delayed = bool(state_of(graph))
        for node in graph.nodes:
            if marked(node, Kind.GEMM) and mark_of(node).gemm == "output" and not is_backward(node):
                sides = [_quantize_behind(input_of(node, index)) for index in (0, 1)]
                grid = self._grid(sides, delayed)
                if grid is not None and grid not in self.grids:
                    self.grids.append(grid)
        return PassReport(0, "changes: grids noted")

    def _grid(self, sides: list[fx.Node | None], delayed: bool) -> WeightGrid | None:
        quantizes = [node for node in sides if node is not None]
        uses = {use.role: (node, use) for node in quantizes if (use := _use(node)) is not None}
        if Role.WEIGHT not in uses or Role.INPUT not in uses:
            return None
        (quantize, weight), (_, read) = uses[Role.WEIGHT], uses[Role.INPUT]
        source, via = _unrounded(input_of(quantize))
        argument = input_number(source) if source.op == "placeholder" else None
        if argument is None:
            return None
        if quantize.target is quantize_nvfp4_op:
            format, scaled_before = E2M1, delayed
        elif quantize.target is quantize_mx_op:
            format, scaled_before = self.rules.forward, False
        else:
            format, scaled_before = format_of(arguments(quantize)[1]), delayed
        four_over_six = self.rules.four_over_six and quantize.target is quantize_nvfp4_op
        recipe = self.rules.recipe
        if recipe == "delayed" and not delayed:
            recipe = "tensorwise"
        elif recipe == "blockwise" and quantize.target is quantize_mx_op:
            recipe = POWER_BLOCKS
        return WeightGrid(argument, recipe, str(format), via, scaled_before, four_over_six, weight, read)


def _quantize_behind(node: fx.Node) -> fx.Node | None:
    """The quantize whose codes an operand of a gemm is, through changes of its layout."""
    while node.op == "call_function":
        if node.target in QUANTIZES:
            return node
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        node = input_of(node)
    return None


def _use(quantize: fx.Node) -> TensorUse | None:
    """The tensor that a node quantizes. Of NVFP4 the node has it that makes the scale of the whole tensor."""
    if quantize.target is not quantize_nvfp4_op:
        return mark_of(quantize).use
    node = input_of(quantize, 1)
    while node.op == "call_function" and node.target is not global_scale_op:
        node = input_of(node)
    return mark_of(node).use


def _unrounded(node: fx.Node) -> tuple[fx.Node, torch.dtype | None]:
    """The tensor before it was flattened and cast, and the dtype that it was cast to."""
    via = None
    while is_call_of(node, CASTS | RESHAPES) or node.target is operator.getitem:
        if is_call_of(node, CASTS):
            via = node.meta["val"].dtype
        node = input_of(node)
    return node, via
