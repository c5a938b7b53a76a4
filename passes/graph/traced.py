"""A plain PyTorch function as the list of operations that it consists of, traced once for each kind of arguments.

A model has many layers of few shapes, and rows of a table by the hundred: a function is traced once per shape, not once
per layer, and where it says so (``passes_on``) once for all numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg

from fp8_compile.torch_internals.graphs import python_dispatcher, trace

Function = TypeVar("Function", bound=Callable[..., Any])


class Ref:
    """Stands for a value: an argument that is a tensor, or the result of an operation."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ref) and other.index == self.index


class Step(NamedTuple):
    """An operation; arguments may have values in them."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Traced(NamedTuple):
    """The tensors among the arguments are the first values; each step adds one. ``result`` has values in it."""

    steps: list[Step]
    result: Any

    def with_number(self, number: int) -> Traced:
        """The same with a number where the function has passed one on."""

        def filled(leaf: Any) -> Any:
            return number if leaf is _NUMBER else leaf

        def with_it(step: Step) -> Step:
            return Step(step.op, map_aggregate(step.args, filled), map_aggregate(step.kwargs, filled))

        return Traced(list(map(with_it, self.steps)), self.result)


class _Number:
    """Stands for the number that a function passes on."""


_NUMBER = _Number()
_traces: dict[Any, Traced] = {}
_first: dict[Any, tuple[int, Traced]] = {}  # of functions that pass a number on: the first number, what was traced
_PASSES_ON = "__fp8_passes_on__"


def passes_on(argument: str) -> Callable[[Function], Function]:
    """Declare that a function does nothing with an integer but to give it to operations as it is.

    What was traced with two numbers then tells where the number is, and holds for every number.
    """

    def declared(function: Function) -> Function:
        setattr(function, _PASSES_ON, list(inspect.signature(function).parameters).index(argument))
        return function

    return declared


def traced(function: Callable[..., Any], args: tuple[Any, ...], mode: Any) -> Traced:
    """The operations of a function, decomposed as Inductor wants them in a joint graph. ``args`` are nodes and
    constants, ``mode`` that of the nodes' values."""
    key = _key(function, args)
    if key is None:
        return _trace(function, args, mode)
    if key in _traces:
        return _traces[key]
    position = getattr(function, _PASSES_ON, None)
    if position is None:
        _traces[key] = _trace(function, args, mode)
        return _traces[key]
    number = args[position]
    family = (*key[: position + 1], None, *key[position + 2 :])
    if family in _traces:
        return _traces[family].with_number(number)
    now = _traces[key] = _trace(function, args, mode)
    if family in _first:
        _traces[family] = _joined(*_first[family], number, now)
    else:
        _first[family] = number, now
    return now


def _trace(function: Callable[..., Any], args: tuple[Any, ...], mode: Any) -> Traced:
    nodes = [arg for arg in args if isinstance(arg, fx.Node)]

    def on_tensors(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        return function(*(next(given) if isinstance(arg, fx.Node) else arg for arg in args))

    with mode, python_dispatcher():
        graph = trace(on_tensors, *(node.meta["val"] for node in nodes))
    values: dict[fx.Node, Ref] = {}
    value_of: Any = values.__getitem__
    count = 0
    steps: list[Step] = []
    for node in graph.nodes:
        if node.op == "output":
            return Traced(steps, map_arg(node.args[0], value_of))
        if node.target is torch.ops.aten.alias.default:  # what it stands for: a node less for all that comes after
            values[node] = values[node.all_input_nodes[0]]
            continue
        if node.op == "call_function":
            args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
            steps.append(Step(node.target, args, kwargs))
        elif node.op != "placeholder":
            raise AssertionError(f"{function.__name__} left a {node.op} node {node.name} that can't be inlined")
        values[node] = Ref(count)
        count += 1
    raise AssertionError("an fx graph ends in an output node")


def _key(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What a trace depends on; None where it is of use for this graph only, because a size is one of its symbols."""
    parts: list[Any] = [function]
    for arg in args:
        if not isinstance(arg, fx.Node):
            parts.append(tuple(arg) if isinstance(arg, list) else arg)
            continue
        tensor = arg.meta["val"]
        sizes = (*tensor.shape, *tensor.stride())
        if not all(isinstance(size, int) for size in sizes):
            return None
        parts.append((sizes, tensor.dtype, tensor.device))
    if any(isinstance(part, torch.SymInt) for part in parts):
        return None
    return tuple(parts)


def _joined(first: int, one: Traced, second: int, other: Traced) -> Traced:
    """What two numbers were traced to, with their place marked."""

    def joined(a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            return {name: joined(a[name], b[name]) for name in a}
        if isinstance(a, (tuple, list)):
            assert len(a) == len(b)
            return type(a)(map(joined, a, b))
        if type(a) is type(b) and a == b:
            return a
        assert (a, b) == (first, second), f"a function that passes {first} and {second} on gave {a} and {b}"
        return _NUMBER

    assert [step.op for step in one.steps] == [step.op for step in other.steps] and one.result == other.result
    pairs = zip(one.steps, other.steps)
    return Traced([Step(a.op, joined(a.args, b.args), joined(a.kwargs, b.kwargs)) for a, b in pairs], one.result)
