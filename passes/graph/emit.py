"""The only place where nodes are made.

A node without its value, its module stack, its checkpointing tag or its mark breaks something far away: Inductor's
lowering, the names in a report, the partitioner. ``emit`` sets all of them together.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fp8_compile.torch_internals.graphs import fake_mode_of, python_dispatcher, trace, triton_launch

from .arguments import arguments
from .marks import KEY, Mark, inherited

# Not "partitioner_tag": where a node runs follows from what it reads.
INHERITED = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "seq_nr",
    "recompute",
    "ac_graph_id",
)
# For what is made for gemms alone, is cheap to make and large: backward makes it again. What only a forward gemm
# reads must not have this tag: the partitioner would keep its source for backward.
NEVER_SAVED = {"recompute": CheckpointPolicy.MUST_RECOMPUTE}


def emit(
    graph: fx.Graph,
    op: Callable[..., Any],
    *args: Any,
    like: fx.Node,
    tags: Mapping[str, Any] | None = None,
    mark: Mark | None = None,
    **kwargs: Any,
) -> fx.Node:
    """Add ``op(*args, **kwargs)`` at the graph's insertion point, with the metadata of ``like``, ``tags`` and ``mark``.
    The new node belongs to the matmul that ``like`` belongs to, whatever ``mark`` says."""
    with fake_mode(like), python_dispatcher():
        result = op(*map_arg(args, value), **map_arg(kwargs, value))
    return _add(graph, op, args, kwargs, result, like, tags, mark)


def inline(
    graph: fx.Graph,
    function: Callable[..., Any],
    *args: Any,
    like: fx.Node,
    tags: Mapping[str, Any] | None = None,
    mark: Mark | None = None,
) -> Any:
    """Add the operations of a plain PyTorch function, decomposed as Inductor wants them in a joint graph.

    ``args`` are nodes or constants; what ``function`` returns (a tensor or a tuple of them) comes back as nodes.
    """
    nodes = [arg for arg in args if isinstance(arg, fx.Node)]
    key = _trace_key(function, args)
    traced = _traces.get(key)
    if traced is None:
        traced = _trace(function, args, nodes, like)
        if key is not None:
            _traces[key] = traced
    made: dict[fx.Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), nodes))
    for node in traced.nodes:
        if node.op == "call_function":
            new_args, new_kwargs = map_arg((node.args, node.kwargs), made.__getitem__)
            made[node] = emit(graph, node.target, *new_args, like=like, tags=tags, mark=mark, **new_kwargs)
        elif node.op == "output":
            return map_arg(node.args[0], made.__getitem__)
        elif node.op != "placeholder":
            raise AssertionError(f"{function.__name__} left a {node.op} node {node.name} that can't be inlined")
    raise AssertionError("an fx graph ends in an output node")


# A model has many layers of few shapes: tracing a function once per shape, not once per layer, halves our passes' time.
_traces: dict[Any, fx.Graph] = {}


def _trace(function: Callable[..., Any], args: tuple[Any, ...], nodes: list[fx.Node], like: fx.Node) -> fx.Graph:
    def on_tensors(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        return function(*(next(given) if isinstance(arg, fx.Node) else arg for arg in args))

    with fake_mode(like), python_dispatcher():
        traced = trace(on_tensors, *map(value, nodes))
    for node in traced.nodes:
        node.meta = {}  # values belong to the graph that was traced for; each use computes its own
    return traced


def _trace_key(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What a trace depends on; None where it is of use for this graph only, because a size is one of its symbols."""
    parts: list[Any] = [function]
    for arg in args:
        if not isinstance(arg, fx.Node):
            parts.append(tuple(arg) if isinstance(arg, list) else arg)
            continue
        tensor = value(arg)
        sizes = (*tensor.shape, *tensor.stride())
        if not all(isinstance(size, int) for size in sizes):
            return None
        parts.append((sizes, tensor.dtype, tensor.device))
    if any(isinstance(part, torch.SymInt) for part in parts):
        return None
    return tuple(parts)


def _add(
    graph: fx.Graph,
    op: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    like: fx.Node,
    tags: Mapping[str, Any] | None,
    mark: Mark | None,
) -> fx.Node:
    node = graph.call_function(op, args, kwargs)
    node.meta = {key: like.meta[key] for key in INHERITED if key in like.meta}
    if node.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        del node.meta["recompute"]  # meant for the matmul, not for what is made on the way to it
    node.meta.update(tags or {}, val=result)
    if (own := inherited(mark, like)) is not None:
        node.meta[KEY] = own
    return node


def call_triton(
    graph: fx.Graph,
    kernel: Any,
    grid: tuple[Any, ...],
    tensors: Mapping[str, fx.Node],
    scalars: Mapping[str, Any],
    *,
    like: fx.Node,
    num_warps: int | None = None,
) -> fx.Node:
    """Add the launch of a Triton kernel that writes to some of ``tensors``, once the graph is split."""
    if num_warps is not None:
        kernel = _with_warps(kernel, num_warps)
    constants = {name: item for name, item in scalars.items() if not isinstance(item, torch.SymInt | fx.Node)}
    given = {**tensors, **{name: item for name, item in scalars.items() if name not in constants}}
    launch, kwargs = triton_launch(kernel, grid, given, constants)
    return _add(graph, launch, (), kwargs, None, like, None, None)


@functools.cache
def _with_warps(kernel: Any, num_warps: int) -> Any:
    """The kernel with the one configuration that it is made for: Inductor takes it from nothing but a decorator."""
    from triton import Config, autotune

    return autotune([Config({}, num_warps=num_warps)], key=[])(kernel)


def first_call(graph: fx.Graph) -> fx.Node:
    """The first node after the placeholders."""
    return next(node for node in graph.nodes if node.op != "placeholder")


def getitem(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """One result of a node that has several."""
    return emit(graph, operator.getitem, node, index, like=node)


def replace_results(graph: fx.Graph, node: fx.Node, results: Sequence[fx.Node]) -> None:
    """Put ``results`` in the place of what a node with several results returns, and erase the node."""
    for user in list(node.users):
        assert user.target is operator.getitem, user.format_node()
        user.replace_all_uses_with(results[arguments(user)[1]])
        graph.erase_node(user)
    graph.erase_node(node)


def policy_of(node: fx.Node) -> dict[str, Any]:
    """The tags with which an FP8 gemm is treated by a checkpointing policy like the matmul that it replaces."""
    return {"recompute": node.meta["recompute"]} if "recompute" in node.meta else {}


def value(node: fx.Node) -> Any:
    """The fake tensor, symbol or number that a node stands for."""
    return node.meta["val"]


def fake_mode(node: fx.Node) -> Any:
    """The mode under which values of this graph are computed."""
    return fake_mode_of(_tensors(node))


def _tensors(node: fx.Node) -> Sequence[Any]:
    return [
        other.meta["val"] for other in (node, *node.all_input_nodes) if isinstance(other.meta.get("val"), torch.Tensor)
    ]
