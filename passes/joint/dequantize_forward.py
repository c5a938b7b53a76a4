"""Let a backward product read what forward multiplied: the quantized operands, in high precision again.

    Before:  y = mm(x, permute(w));  dx = mm(dy, w);  dw = mm(permute(dy), x)
    After:   qx, sx = quantize(x);  qw, sw = quantize(w);  y = _scaled_mm(qx, permute(qw), sx, sw)
             dx = mm(dy, dequantize_fp8_operand(qw, sw));  dw = mm(permute(dy), dequantize_fp8_operand(qx, sx))

That is the gradient of the quantized forward, with every rounding taken for the identity. Codes are saved for backward,
or made again there from what is saved anyway; what they stand for is not.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch
from torch import fx

from ..graph.arguments import input_of, named_arguments
from ..graph.emit import NEVER_SAVED, emit, inline, value
from ..graph.groups import is_both_gradients
from ..graph.matmul import GroupedMatmul, Matmul
from ..graph.roles import Role
from .find_matmuls import MATMUL_OPS

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class QuantizedOperand:
    """What forward made of an operand, and how to undo it: ``op(*arguments, dtype)``."""

    op: Callable[..., Any]
    arguments: tuple[Any, ...]
    flipped: bool  # the operand is the transpose of that
    stack: tuple[Any, ...] = ()  # sizes of a stack of matrices, which was quantized as one matrix


class ForwardOperands:
    """The operands of the forward products of a graph, as they were quantized."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, bool], dict[int | None, QuantizedOperand]] = {}

    def note(self, site: Matmul, is_left: bool, part: int | None, operand: QuantizedOperand) -> None:
        """``part``: which product of a stack the operand is of."""
        if site.gemm == "output":
            self._known.setdefault((site.node, is_left), {})[part] = operand

    def read_by(self, graph: fx.Graph, site: Matmul) -> None:
        """Have a backward product read them."""
        assert site.forward is not None, site.node.format_node()
        other_is_left = site.right.role is Role.GRAD_OUTPUT
        other = site.left if other_is_left else site.right
        of_left = site.forward.left.role is other.role
        known = self._known[site.forward.node, of_left]
        node, position, transposed = _reader(site, other_is_left, of_left)
        dtype = value(other.node).dtype
        with graph.inserting_before(node):
            slices = [_emit(graph, known[part], dtype, transposed, site.node) for part in known]  # in their order
            operand = slices[0]
            if None not in known:
                operand = inline(graph, _stack, *slices, like=site.node, tags=NEVER_SAVED)
        node.args = tuple(operand if index == position else argument for index, argument in enumerate(node.args))


def is_known(site: Matmul) -> bool:
    """True if a backward product has the forward product whose operand it reads, in its form."""
    if site.forward is None:
        return False
    other_is_left = site.right.role is Role.GRAD_OUTPUT
    other = site.left if other_is_left else site.right
    of_left = site.forward.left.role is other.role
    operand = site.forward.left if of_left else site.forward.right
    *_, transposed = _reader(site, other_is_left, of_left)
    *stack, rows, cols = value(operand.node).shape
    expected = (*stack, cols, rows) if transposed else (*stack, rows, cols)
    return expected == tuple(value(other.node).shape)


def _reader(site: Matmul, other_is_left: bool, of_left: bool) -> tuple[fx.Node, int, bool]:
    """The operation that reads a forward operand, which argument of it that is, and whether it is transposed there.

    The gradient of left is ``dy @ right^T``, or transposed ``right @ dy^T``; that of right is ``left^T @ dy``, or
    transposed ``dy^T @ left``.
    """
    node = site.node
    if isinstance(site, GroupedMatmul):
        if node.op == "call_function" and node.args and is_both_gradients(whole := input_of(node)):
            return whole, list(named_arguments(whole)).index("input" if of_left else "weight"), False
        return node, 0 if other_is_left else 1, of_left == other_is_left
    at_left, at_right, _ = MATMUL_OPS[node.target]  # type: ignore[index]
    return node, at_left if other_is_left else at_right, of_left == other_is_left


def _emit(graph: fx.Graph, known: QuantizedOperand, dtype: torch.dtype, transposed: bool, like: fx.Node) -> fx.Node:
    node = emit(graph, known.op, *known.arguments, dtype, like=like, tags=NEVER_SAVED)
    if known.stack:
        node = emit(graph, aten.view.default, node, list(known.stack), like=like, tags=NEVER_SAVED)
    return _transposed(graph, node, like) if transposed != known.flipped else node


def _transposed(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    dims = [1, 0] if value(node).dim() == 2 else [0, 2, 1]
    return emit(graph, aten.permute.default, node, dims, like=like, tags=NEVER_SAVED)


def _stack(*slices: torch.Tensor) -> torch.Tensor:
    return torch.stack(slices)
