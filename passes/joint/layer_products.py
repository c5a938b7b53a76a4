"""Products with the packed weight of a linear layer."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from ..graph.emit import value
from ..graph.roles import is_backward
from ..graph.row import Gemm
from .packed_formats import OF_LAYERS, Inputs, Operands, PackedFormat, Rounding, dtype_name
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


@dataclasses.dataclass(frozen=True)
class LayerGradient(PackedProduct):
    """``node = grad @ dequantize(...)``, the gradient of a layer's inputs."""

    gemm: ClassVar[Gemm] = "grad_input"
    grad: fx.Node
    dequantize: fx.Node

    @property
    def format(self) -> PackedFormat:
        return OF_LAYERS[self.dequantize.target]

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """(M, N, K) of the product: its sums go along the layer's outputs."""
        n, k = value(self.dequantize).shape
        return value(self.grad).shape[0], k, n

    def inputs(self, target: str) -> Inputs:
        return Inputs(dtype_name(self.grad))

    def reason(self, inputs: Inputs) -> str:
        return f"packed weight: {self.format.name}, gradient {inputs.format}"

    def weight(self, names: StackNames, module: str) -> str:
        return f"{module}.codes".strip(".")

    def emit(self, graph: fx.Graph, target: str) -> fx.Node:
        grad = cast(graph, self.grad, value(self.node).dtype, like=self.node)
        return self.format.multiply_grad(graph, grad, self.dequantize, like=self.node)


def find_layer_gradient(node: fx.Node) -> LayerGradient | None:
    """The gradient's product with the packed weight of a layer, if a node is one that has a product of its own."""
    if node.target is not aten.mm.default:
        return None
    grad, weight = node.args
    assert isinstance(grad, fx.Node) and isinstance(weight, fx.Node)
    dequantize = _dequantize_of(weight, flipped=False)
    if not is_backward(node) or dequantize is None or value(grad).dtype not in DTYPES:
        return None
    if not OF_LAYERS[dequantize.target].multiplies_grad():
        return None
    return LayerGradient(node, grad, dequantize)


def find_layer_product(node: fx.Node, target: str = "cpu") -> LayerProduct | None:
    """The product of a node with the packed weight of a layer, if it is one that the target can run from it."""
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
    format = OF_LAYERS[dequantize.target]
    x, rounding = _before_rounding(x, format)
    operands = Operands(x, dequantize, bias, rounding)
    return LayerProduct(node, operands) if format.multiplies(operands, target) else None


def _dequantize_of(weight: fx.Node, flipped: bool = True) -> fx.Node | None:
    """The dequantize that an operand is, or is the transpose of where ``flipped``, casts aside."""
    turned = False
    node: object = weight
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in OF_LAYERS:
            return node if turned == flipped else None
        if node.target is aten.t.default or (node.target is aten.permute.default and node.args[1] == [1, 0]):
            turned = not turned
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
