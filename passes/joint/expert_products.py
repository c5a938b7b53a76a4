"""Products with packed stacks of experts, and lookups in them: of a stack only the experts that rows go to are read."""

from __future__ import annotations

import dataclasses
import operator
from typing import ClassVar

import torch
from torch import fx

from fp8_compile.torch_internals.graphs import OpOverload, schema_name

from ..graph.emit import emit, value
from ..graph.roles import is_backward
from ..graph.row import Gemm
from .packed_formats import OF_EXPERTS, Inputs, PackedFormat, dtype_name
from .packed_product import CASTS, DTYPES, PackedProduct, StackNames, cast

aten = torch.ops.aten
# transformers' own op stands for _grouped_mm where that can't be compiled: any dtype but bf16.
GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
GROUPED_BACKWARD = "transformers::grouped_mm_fallback_backward"


@dataclasses.dataclass(frozen=True)
class Stack:
    """``matrices = dequantize(...)[which]``, perhaps transposed."""

    dequantize: fx.Node
    which: fx.Node | None  # None: all of them
    flipped: bool  # [.., K, N]


@dataclasses.dataclass(frozen=True)
class ExpertsProduct(PackedProduct):
    """``node[row] = x[row] @ dequantize[expert of the row].T``."""

    x: fx.Node  # [M, K], or with a dimension of 1 at ``dim``
    dequantize: fx.Node
    which: fx.Node
    rows: str  # "grouped" or "gathered"
    dim: int | None = None  # of a bmm, where rows of x and of the result have a dimension of 1

    @property
    def format(self) -> PackedFormat:
        return OF_EXPERTS[self.dequantize.target]

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """(E, M, N, K)."""
        count, n, k = value(self.dequantize).shape
        return count, value(self.node).shape[0], n, k

    def inputs(self, target: str) -> Inputs:
        return self.format.inputs_of_experts(self.x, self.dequantize)

    def reason(self, inputs: Inputs) -> str:
        words = f", {inputs.words}" if inputs.words else ""
        return f"packed experts: {self.format.name}, inputs {inputs.format}{words}; rows {self.rows}"

    def weight(self, names: StackNames, module: str) -> str:
        codes = self.dequantize.args[0]
        while isinstance(codes, fx.Node) and codes.op == "call_function":  # of a sharded base, views of its bytes
            codes = codes.args[0]
        assert isinstance(codes, fx.Node)
        return next(iter(names.buffers_of(codes) or names.parameters_of(codes)), "")

    def emit(self, graph: fx.Graph, target: str) -> fx.Node:
        x, node = self.x, self.node
        if self.dim is not None:
            x = _without_dim(graph, x, self.dim, like=node)
        x = cast(graph, x, value(node).dtype, like=node)
        result = self._multiply(graph, x)
        return result if self.dim is None else emit(graph, aten.unsqueeze.default, result, self.dim, like=node)

    def _multiply(self, graph: fx.Graph, x: fx.Node) -> fx.Node:
        return self.format.multiply_experts(graph, x, self.dequantize, self.which, self.rows, like=self.node)


@dataclasses.dataclass(frozen=True)
class ExpertsGradient(ExpertsProduct):
    """``node[row] = x[row] @ dequantize[expert of the row]``: x is the gradient, the result that of the inputs."""

    gemm: ClassVar[Gemm] = "grad_input"

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """(E, M, N, K) of the product: its sums go along the experts' outputs."""
        count, n, k = value(self.dequantize).shape
        return count, value(self.x).shape[0], k, n

    def reason(self, inputs: Inputs) -> str:
        return f"packed experts: {self.format.name}, gradient {inputs.format}; rows {self.rows}"

    def inputs(self, target: str) -> Inputs:
        return Inputs(dtype_name(self.x))

    def _multiply(self, graph: fx.Graph, x: fx.Node) -> fx.Node:
        return self.format.multiply_experts_grad(graph, x, self.dequantize, self.which, self.rows, like=self.node)


def _without_dim(graph: fx.Graph, x: fx.Node, dim: int, *, like: fx.Node) -> fx.Node:
    """x [M, K], of one with a dimension of 1 more."""
    if x.target is aten.unsqueeze.default:
        inner, at = x.args
        if isinstance(inner, fx.Node) and isinstance(at, int) and at % 3 == dim:
            return inner
    return emit(graph, aten.squeeze.dim, x, dim, like=like)


def find_experts_product(node: fx.Node) -> ExpertsProduct | None:
    """The product of a node with a stack of experts, if it is one."""
    if is_backward(node):
        return _gradient(node)
    if not isinstance(node.target, OpOverload):
        return None
    if schema_name(node) in GROUPED:
        return _grouped(node)
    return _gathered(node) if node.target is aten.bmm.default else None


def _gradient(node: fx.Node) -> ExpertsProduct | None:
    """The gradient's product with a stack of experts. transformers' own op makes two gradients, of which that of a
    packed stack is not used."""
    if node.target is operator.getitem and node.args[1] == 0:
        both = node.args[0]
        if not isinstance(both, fx.Node) or not isinstance(both.target, OpOverload):
            return None
        if schema_name(both) != GROUPED_BACKWARD or any(user.args[1] != 0 for user in both.users):
            return None
        _, weight, ends, grad = both.args
        assert isinstance(grad, fx.Node) and isinstance(ends, fx.Node)
        stack = _stack_of(weight)
        if stack is None or stack.which is not None or not stack.flipped or value(grad).dtype not in DTYPES:
            return None
        return ExpertsGradient(node, grad, stack.dequantize, ends, "grouped")
    if not isinstance(node.target, OpOverload):
        return None
    if schema_name(node) == GROUPED[0]:
        return _grouped(node, flipped=False, kind=ExpertsGradient)
    return _gathered(node, turned=True, kind=ExpertsGradient) if node.target is aten.bmm.default else None


def _grouped(
    node: fx.Node, flipped: bool = True, kind: type[ExpertsProduct] = ExpertsProduct
) -> ExpertsProduct | None:
    x, weight, ends, *rest = (*node.args, *node.kwargs.values())
    stack = _stack_of(weight)
    if any(one is not None for one in rest) or stack is None or stack.which is not None or stack.flipped != flipped:
        return None
    assert isinstance(x, fx.Node) and isinstance(ends, fx.Node)
    if value(x).dim() != 2 or value(x).dtype not in DTYPES:
        return None
    return kind(node, x, stack.dequantize, ends, "grouped")


def _gathered(
    node: fx.Node, turned: bool = False, kind: type[ExpertsProduct] = ExpertsProduct
) -> ExpertsProduct | None:
    left, right = node.args
    for x, weight, dim, flipped in ((right, left, 2, turned), (left, right, 1, not turned)):
        stack = _stack_of(weight)
        if stack is None or stack.which is None or stack.flipped != flipped or value(stack.which).dim() != 1:
            continue
        assert isinstance(x, fx.Node)
        if value(x).shape[dim] == 1 and value(x).dtype in DTYPES:
            return kind(node, x, stack.dequantize, stack.which, "gathered", dim)
    return None


def _stack_of(node: object) -> Stack | None:
    """The stack that an operand is made of, transposing, casts and one lookup aside."""
    flipped, which = False, None
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in OF_EXPERTS:
            all_of_them = len(node.args) <= OF_EXPERTS[node.target].experts_arguments
            return Stack(node, which, flipped) if all_of_them else None
        if _flips(node):
            flipped = not flipped
        elif which is None and _looked_up(node) is not None:
            which = _looked_up(node)
        elif node.target not in CASTS:
            return None
        node = node.args[0]
    return None


def _flips(node: fx.Node) -> bool:
    """True if a node swaps the last two dimensions."""
    if node.target not in (aten.permute.default, aten.transpose.int):
        return False
    dims = value(node).dim()
    order = list(range(dims))
    if node.target is aten.permute.default:
        order = [one % dims for one in _sizes(node.args[1])]
    else:
        first, second = _sizes(node.args[1:])
        order[first], order[second] = order[second], order[first]
    return dims > 1 and order == [*range(dims - 2), dims - 1, dims - 2]


def _sizes(given: object) -> list[int]:
    assert isinstance(given, (list, tuple)) and all(isinstance(one, int) for one in given)
    return list(given)


def _looked_up(node: fx.Node) -> fx.Node | None:
    """``which`` of ``index(w, [which])``."""
    if node.target is not aten.index.Tensor:
        return None
    indices = node.args[1]
    if not isinstance(indices, (list, tuple)) or len(indices) != 1 or not isinstance(indices[0], fx.Node):
        return None
    return indices[0] if value(indices[0]).dtype in (torch.int32, torch.int64) else None


def round_inputs_of_experts(graph: fx.Graph) -> int:
    """Round what experts multiply, where their inputs are rounded and no product of ours does it."""
    found = [product for node in graph.nodes if (product := find_experts_product(node)) is not None]
    rounding = [one for one in found if one.gemm == "output" and one.format.rounds_experts]
    for product in rounding:
        node, x, dim = product.node, product.x, product.dim
        with graph.inserting_before(node):
            rows = x if dim is None else _without_dim(graph, x, dim, like=node)
            rounded = product.format.round_rows(graph, rows, product.dequantize, like=node)
            if dim is not None:
                rounded = emit(graph, aten.unsqueeze.default, rounded, dim, like=node)
        node.replace_input_with(x, rounded)
    return len(rounding)


def look_up_packed(graph: fx.Graph) -> int:
    """Dequantize only the experts that are looked up: ``dequantize(...)[which]`` is ``dequantize(..., which)``."""
    found = [(node, stack) for node in graph.nodes if (stack := _stack_looked_up(node)) is not None]
    for node, stack in found:
        with graph.inserting_before(node):
            target = stack.dequantize.target
            assert callable(target)
            result = emit(graph, target, *stack.dequantize.args, stack.which, like=node)
            if stack.flipped:
                dims = value(result).dim()
                result = emit(graph, aten.permute.default, result, [*range(dims - 2), dims - 1, dims - 2], like=node)
            result = cast(graph, result, value(node).dtype, like=node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return len(found)


def _stack_looked_up(node: fx.Node) -> Stack | None:
    """The stack that a node looks experts up in."""
    if node.op != "call_function" or _looked_up(node) is None:
        return None
    looked_in, stack = node.args[0], _stack_of(node)
    assert isinstance(looked_in, fx.Node)
    return stack if value(looked_in).dim() == 3 else None
