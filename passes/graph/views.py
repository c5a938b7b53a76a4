"""What lies behind transposes."""

from __future__ import annotations

import torch
from torch import fx

aten = torch.ops.aten


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
