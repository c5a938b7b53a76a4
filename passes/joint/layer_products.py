"""Products with the packed weight of a linear layer."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from ..graph.emit import value
from ..graph.roles import is_backward
from .packed_formats import OF_LAYERS, Inputs, Operands, PackedFormat, Rounding
from .packed_product import CASTS, DTYPES, PackedProduct, StackNames, cast

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class LayerProduct(PackedProduct):
    """``node = round(x) @ dequantize(...).T + bias``."""

    operands: Operands

    @property
    def format(self) -> PackedFormat:
        return OF_LAYERS[self.operands.dequantize.target]

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        return self.operands.shape

    def inputs(self, target: str) -> Inputs:
        return self.format.inputs(self.operands, target)

    def reason(self, inputs: Inputs) -> str:
        words = f", {inputs.words}" if inputs.words else ""
        return f"packed weight: {self.format.name}, inputs {inputs.format}{words}"

    def weight(self, names: StackNames, module: str) -> str:
        return f"{module}.codes".strip(".")

    def emit(self, graph: fx.Graph, target: str) -> fx.Node:
        x = cast(graph, self.operands.x, value(self.node).dtype, like=self.node)
        return self.format.multiply(graph, dataclasses.replace(self.operands, x=x), target, like=self.node)


def find_layer_product(node: fx.Node) -> LayerProduct | None:
    """The product of a node with the packed weight of a layer, if it is one."""
    bias: object = None
    if node.target is aten.mm.default:
        x, weight = node.args
    elif node.target is aten.addmm.default and node.kwargs in ({}, {"beta": 1, "alpha": 1}):
        bias, x, weight = node.args
    else:
        return None
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node) and (bias is None or isinstance(bias, fx.Node))
    dequantize = _dequantize_of(weight)
    matrix_added = bias is not None and value(bias).dim() != 1
    if is_backward(node) or matrix_added or dequantize is None or value(x).dtype not in DTYPES:
        return None
    x, rounding = _before_rounding(x, OF_LAYERS[dequantize.target])
    return LayerProduct(node, Operands(x, dequantize, bias, rounding))


def _dequantize_of(weight: fx.Node) -> fx.Node | None:
    """The dequantize that a [K, N] operand is the transpose of, casts aside."""
    flipped = False
    node: object = weight
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in OF_LAYERS:
            return node if flipped else None
        if node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0]):
            flipped = not flipped
        elif node.target not in CASTS:
            return None
        node = node.args[0]
    return None


def _before_rounding(x: fx.Node, format: PackedFormat) -> tuple[fx.Node, Rounding | None]:
    """What was rounded, and how; ``x`` itself where nothing was. A cast after the rounding is done before it."""
    source = x.args[0] if x.target in CASTS else x
    if isinstance(source, fx.Node) and source.target is format.round:
        before = source.args[0]
        assert isinstance(before, fx.Node)
        return before, format.rounding(source)
    return x, None
