"""Chains of views and casts: what they start from, and whether they transpose it.

Every set of view operations is here, made of the groups below: a pass says which groups it follows.
"""

from __future__ import annotations

from typing import Any, Container

import torch
from torch import fx

from .arguments import input_of

aten, prims = torch.ops.aten, torch.ops.prims

RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
TRANSPOSES = frozenset({aten.permute.default, aten.t.default, aten.transpose.int})
SIZES_OF_ONE = frozenset({aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default})
PARTS = frozenset({aten.select.int, aten.slice.Tensor})
ALIASES = frozenset({aten.alias.default})
CASTS = frozenset({prims.convert_element_type.default, aten._to_copy.default})
REPEATS = frozenset({aten.expand.default, aten.clone.default})

# Every element of the result is one of the tensor's, and no element is there twice.
VIEWS = RESHAPES | TRANSPOSES | SIZES_OF_ONE | ALIASES
# Operations that move or reinterpret elements without mixing them: an operand is followed through these to its root.
LOOK_THROUGH = VIEWS | REPEATS | CASTS


def is_call_of(node: fx.Node, ops: Container[Any]) -> bool:
    """True for a call of one of these operations."""
    return node.op == "call_function" and node.target in ops


def through(node: fx.Node, ops: Container[Any]) -> fx.Node:
    """The node that a chain of these operations starts from."""
    while is_call_of(node, ops):
        node = input_of(node)
    return node


def root_of(node: fx.Node) -> fx.Node:
    """The node that a chain of views and casts starts from."""
    return through(node, LOOK_THROUGH)


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """The matrix, or the stack of matrices, that ``node`` is a chain of transposes of; and True if their number is
    odd."""
    flipped = False
    while node.op == "call_function":
        if _is_transpose(node):
            flipped = not flipped
        elif node.target not in ALIASES:
            break
        node = input_of(node)
    return node, flipped


def _is_transpose(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return list(dims) in ([1, 0], [0, 2, 1])
    return node.target is aten.t.default
