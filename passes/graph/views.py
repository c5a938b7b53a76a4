"""Chains of views: what they start from, and whether they transpose it."""

from __future__ import annotations

import torch
from torch import fx

aten, prims = torch.ops.aten, torch.ops.prims

# Ops that move or reinterpret elements without mixing them: an operand is followed through these to its root.
LOOK_THROUGH = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.expand.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.alias.default,
    prims.convert_element_type.default,
    aten._to_copy.default,
}


def root_of(node: fx.Node) -> fx.Node:
    """The node that a chain of views and casts starts from."""
    while node.op == "call_function" and node.target in LOOK_THROUGH:
        node = node.args[0]  # type: ignore[assignment]
    return node


def untransposed(node: fx.Node) -> tuple[fx.Node, bool]:
    """The matrix, or the stack of them, that ``node`` is a chain of transposes of; and whether an odd number."""
    flipped = False
    while node.op == "call_function":
        if _is_transpose(node):
            flipped = not flipped
        elif node.target is not aten.alias.default:
            break
        node = node.args[0]  # type: ignore[assignment]
    return node, flipped


def _is_transpose(node: fx.Node) -> bool:
    if node.target is aten.permute.default:
        return list(node.args[1]) in ([1, 0], [0, 2, 1])  # type: ignore[arg-type]
    return node.target is aten.t.default
