"""The arguments of a node, with types that a reader and a type checker can work with.

``fx.Node.args`` is a tuple of anything that fx can store. What an argument is follows from the operation's schema,
which the caller knows.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fp8_compile.torch_internals.graphs import argument_names


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments, to be unpacked by the caller."""
    return node.args


def input_of(node: fx.Node, index: int = 0) -> fx.Node:
    """The node that is the argument at ``index``."""
    argument = node.args[index]
    assert isinstance(argument, fx.Node), node.format_node()
    return argument


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments that were given, positional ones too, by their names in the operation's schema."""
    return {**dict(zip(argument_names(node), node.args)), **node.kwargs}
