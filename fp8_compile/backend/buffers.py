"""Tensors of the model's state become buffers of a graph, which reach its joint graph as placeholders."""

from __future__ import annotations

from typing import Mapping

from torch import Tensor, fx

from fp8_compile.passes.graph.slot import FIELDS, STATS
from fp8_compile.scaling.graph_slots import GraphPool
from fp8_compile.torch_internals.dynamo import name_buffer


def attach_state(gm: fx.GraphModule, pool: GraphPool, *, stats: bool) -> None:
    """Give a graph its part of the scaling state."""
    attach_buffers(gm, pool.buffers((*FIELDS, STATS) if stats else FIELDS))


def attach_buffers(gm: fx.GraphModule, buffers: Mapping[str, Tensor]) -> None:
    """Make tensors buffers of the graph; the placeholders have these names."""
    for name, tensor in buffers.items():
        gm.register_buffer(name, tensor)
        name_buffer(gm, name)
