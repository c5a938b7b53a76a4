"""The operations that multiply ragged groups, the layers of experts of a mixture, seen as one.

    rows       y [T, N]    = left [T, K] @ right [G, K, N]     row t by the matrix of the group that t is in
    contract   y [G, M, N] = left [M, T] @ right [T, N]        one product per group, over its t's

    aten._grouped_mm(left, right, offsets)                                      either
    transformers.grouped_mm_fallback(x, w, offsets)                             rows
    transformers.grouped_mm_fallback_backward(x, w, offsets, dy) -> dx, dw      rows and contract, one node for both

Hugging Face's models call torch's operation in bf16, and otherwise their own. Each result of the last operation is a
product, which is represented by its ``getitem``.
"""

from __future__ import annotations

import dataclasses
import operator

import torch
from torch import fx

from fp8_compile.torch_internals.graphs import op_name, schema_name

from .arguments import arguments, named_arguments
from .emit import value

Size = int | torch.SymInt
BOTH_GRADIENTS = "transformers::grouped_mm_fallback_backward"
GROUPED_OPS = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


@dataclasses.dataclass(frozen=True)
class Side:
    """An operand: a matrix or a stack of matrices. ``flipped``: its last two dimensions are to be exchanged."""

    node: fx.Node
    flipped: bool = False

    @property
    def shape(self) -> tuple[Size, ...]:
        *stack, rows, cols = value(self.node).shape
        return (*stack, cols, rows) if self.flipped else (*stack, rows, cols)


@dataclasses.dataclass(frozen=True)
class GroupedProduct:
    """``left @ right`` in groups. ``flipped``: the graph wants the result with its last two dimensions exchanged."""

    left: Side
    right: Side
    offsets: fx.Node
    flipped: bool = False

    @property
    def contracts(self) -> bool:
        """True if the groups divide the contraction, and not the rows."""
        return len(self.right.shape) == 2

    @property
    def shape(self) -> tuple[Size, ...]:
        """(groups, M, N, K)."""
        return (value(self.offsets).shape[0], self.left.shape[0], self.right.shape[-1], self.left.shape[1])


def grouped_product(node: fx.Node) -> GroupedProduct | None:
    """The product of ragged groups that a node is; None if it is not one, or of a form that is left alone."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        whole, index = arguments(node)
        return _gradient(whole, index) if is_both_gradients(whole) else None
    if schema_name(node) not in GROUPED_OPS:
        return None
    given = named_arguments(node)
    left, right = arguments(node)[:2]
    dims = value(left).dim(), value(right).dim()
    if dims not in ((2, 3), (2, 2)) or given.get("bias") is not None:
        return None
    return GroupedProduct(Side(left), Side(right), given["offs"])


def is_both_gradients(node: fx.Node) -> bool:
    """True for the backward op that returns both gradients; each product is represented by its ``getitem``."""
    return node.op == "call_function" and schema_name(node) == BOTH_GRADIENTS


def written_as(node: fx.Node) -> str:
    """The name of the operation that a matmul was written as."""
    return op_name(node.all_input_nodes[0] if node.target is operator.getitem else node)


def _gradient(node: fx.Node, index: int) -> GroupedProduct:
    given = named_arguments(node)
    x, w, offsets, dy = (given[name] for name in ("input", "weight", "offs", "grad_output"))
    if index == 0:
        return GroupedProduct(Side(dy), Side(w, flipped=True), offsets)
    # The gradient of a transposed view is wanted as a transposed view, of an [E, N, K] tensor like the weight's own.
    if value(w).stride(1) == 1 and value(w).stride(2) != 1:
        return GroupedProduct(Side(dy, flipped=True), Side(x), offsets, flipped=True)
    return GroupedProduct(Side(x, flipped=True), Side(dy), offsets)
