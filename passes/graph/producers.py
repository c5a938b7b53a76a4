"""Where a tensor comes from: which kernel of Inductor's would compute it, and how that kernel goes over it."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8_compile.torch_internals.inductor import unroll_threshold

from .arguments import input_of
from .emit import value
from .marks import Kind, marked
from .views import root_of

MOST_SOURCES = 64  # how far back to look for where a tensor comes from


def made_by_reduction(node: fx.Node) -> bool:
    """True for what is computed, element by element, from a reduction of its own row, such as a norm's output."""
    return not all(map(_is_unrolled, reductions_before(node)))


def reductions_before(node: fx.Node) -> list[fx.Node]:
    """The reductions that a node is computed from, element by element."""
    sources = (input_of(one) if one.target is operator.getitem else one for one in pointwise_sources(node))
    return [one for one in sources if torch.Tag.reduction in op_tags(one)]


def made_pointwise(node: fx.Node) -> bool:
    """True for what is computed element by element from tensors in memory, such as an activation's output."""
    sources = pointwise_sources(node)
    return len(sources) > 1 and not made_by_reduction(node)


def pointwise_sources(node: fx.Node) -> list[fx.Node]:
    """A node, without its views and casts, and the nodes that it is computed from element by element. Scales are left
    out: they are there before the kernel starts."""
    found: dict[fx.Node, None] = {root_of(node): None}
    for one in (pending := list(found)):
        if torch.Tag.pointwise not in op_tags(one) or len(found) > MOST_SOURCES:
            continue
        arguments = [root_of(arg) for arg in one.all_input_nodes if not marked(arg, Kind.SCALES)]
        new = [arg for arg in arguments if arg not in found]
        found.update(dict.fromkeys(new))
        pending += new
    return list(found)


def op_tags(node: fx.Node) -> Sequence[torch.Tag]:
    """What torch says of a node's operation: that it is pointwise, that it is a reduction."""
    return getattr(node.target, "tags", ()) if node.op == "call_function" else ()


def _is_unrolled(reduction: fx.Node) -> bool:
    """True for a reduction of few elements, such as of the heads that share a key: Inductor makes it a pointwise
    sum."""
    read, written = value(input_of(reduction)), value(reduction)
    written = written if isinstance(written, torch.Tensor) else written[0]
    return statically_known_true(read.numel() <= unroll_threshold() * written.numel())
