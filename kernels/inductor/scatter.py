"""A store of a kind of ours, as a node of Inductor's."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from torch._inductor import ir
from torch._inductor.virtualized import V


def scatter_into(
    target: Any,
    values: Callable[[Any], Any],
    ranges: Sequence[Any],
    place: Callable[[Any], Any],
    mode: Any,
) -> None:
    """For every index in ``ranges``, store ``values(index)`` in ``target`` at ``place(index)``, in that ``mode``."""
    scatter = ir.Scatter(
        device=target.get_device(),
        dtype=target.get_dtype(),
        inner_fn=values,
        ranges=list(ranges),
        output_indexer=place,
        scatter_mode=mode,
    )
    buffer = ir.ComputedBuffer(name=None, layout=ir.MutationLayoutSHOULDREMOVE(target), data=scatter)
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)
