"""The operations that multiply ragged groups, the layers of experts of a mixture, seen as one.

    rows       y [T, N]    = left [T, K] @ right [G, K, N]     row t by the matrix of the group that t is in
    contract   y [G, M, N] = left [M, T] @ right [T, N]        one product a group, over its t's

    aten._grouped_mm(left, right, offsets)                                      either
    transformers.grouped_mm_fallback(x, w, offsets)                             rows
    transformers.grouped_mm_fallback_backward(x, w, offsets, dy) -> dx, dw      rows and contract, one node for both

Hugging Face's models call torch's operation in bf16, and otherwise their own. Of the last each result is a product of
its own: that is the node with which the result is taken out.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from fp8_compile.torch_internals.graphs import argument_names, op_name, schema_name

from .emit import value

Size = int | torch.SymInt
BACKWARD = "transformers::grouped_mm_fallback_backward"
PRODUCTS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


@dataclasses.dataclass(frozen=True)
class Side:
    """An operand: a matrix or a stack of them; ``flipped``: its last two dimensions are to be exchanged."""

    node: fx.Node
    flipped: bool = False

    @property
    def shape(self) -> tuple[Size, ...]:
        *stack, rows, cols = value(self.node).shape
        return (*stack, cols, rows) if self.flipped else (*stack, rows, cols)


@dataclasses.dataclass(frozen=True)
class GroupedProduct:
    """``left @ right`` in groups; ``flipped``: what the graph wants has its last two dimensions exchanged."""

    left: Side
    right: Side
    offsets: fx.Node
    flipped: bool = False

    @property
    def contracts(self) -> bool:
        """Whether the groups divide the contraction, and not the rows."""
        return len(self.right.shape) == 2

    @property
    def shape(self) -> tuple[Size, ...]:
        """(groups, M, N, K)."""
        return (value(self.offsets).shape[0], self.left.shape[0], self.right.shape[-1], self.left.shape[1])


def grouped_product(node: fx.Node) -> GroupedProduct | None:
    """What a node is as a product of ragged groups; None: nothing of the kind, or a kind that is left alone."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        whole, index = node.args
        return _gradient(whole, index) if is_both_gradients(whole) else None  # type: ignore[arg-type]
    if schema_name(node) not in PRODUCTS:
        return None
    arguments = _arguments(node)
    left, right = node.args[:2]
    dims = value(left).dim(), value(right).dim()  # type: ignore[arg-type]
    if dims not in ((2, 3), (2, 2)) or arguments.get("bias") is not None:
        return None
    return GroupedProduct(Side(left), Side(right), arguments["offs"])  # type: ignore[arg-type]


def is_both_gradients(node: fx.Node) -> bool:
    """Whether a node has two products for results, of which each is found where it is taken out."""
    return node.op == "call_function" and schema_name(node) == BACKWARD


def written_as(node: fx.Node) -> str:
    """The name of the operation that a matmul was written as."""
    return op_name(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _gradient(node: fx.Node, index: int) -> GroupedProduct:
    x, w, offsets, dy = (_arguments(node)[name] for name in ("input", "weight", "offs", "grad_output"))
    if index == 0:
        return GroupedProduct(Side(dy), Side(w, flipped=True), offsets)
    # As it is stored: the gradient of a transposed view is wanted as one, and [E, N, K] is what lies behind it.
    if value(w).stride(1) == 1 and value(w).stride(2) != 1:
        return GroupedProduct(Side(dy, flipped=True), Side(x), offsets, flipped=True)
    return GroupedProduct(Side(x, flipped=True), Side(dy), offsets)


def _arguments(node: fx.Node) -> dict[str, fx.Node]:
    return {**dict(zip(argument_names(node), node.args)), **node.kwargs}  # type: ignore[dict-item]
