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
from torch.fx.node import map_aggregate, map_arg
from torch.utils.checkpoint import CheckpointPolicy

from fp8_compile.torch_internals.fake_results import run_fake
from fp8_compile.torch_internals.graphs import fake_mode_of, triton_launch

from .arguments import arguments
from .marks import KEY, Mark, inherited
from .traced import Ref, traced

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
    result = run_fake(fake_mode(like), op, map_arg(args, value), map_arg(kwargs, value))
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
    known = traced(function, args, fake_mode(like))
    made = [arg for arg in args if isinstance(arg, fx.Node)]

    def filled(leaf: Any) -> Any:
        return made[leaf.index] if isinstance(leaf, Ref) else leaf

    for op, op_args, op_kwargs in known.steps:
        given, named = map_aggregate(op_args, filled), map_aggregate(op_kwargs, filled)
        made.append(emit(graph, op, *given, like=like, tags=tags, mark=mark, **named))
    return map_aggregate(known.result, filled)


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
    # Arguments afterwards: of what it is given at once, torch looks at every part, which takes longer than the rest.
    node = graph.call_function(op)
    node.args, node.kwargs = args, kwargs
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
    return fake_mode_of(other.meta.get("val") for other in (node, *node.all_input_nodes))
