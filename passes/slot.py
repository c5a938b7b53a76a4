"""Where delayed scaling keeps what it knows of a tensor: slots, and the pool of them that a model has."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import fx

from .find_matmuls import Role

FORWARD, BACKWARD = "forward", "backward"
FIELDS = ("amaxes", "history", "scales", "counts")  # of a page, in the order in which ops take them
STATS = "stats"  # one more, where statistics are asked for


@dataclasses.dataclass(frozen=True)
class Slot:
    """One quantized tensor: an operand of the ``ordinal``-th matmul that a module does.

    Tensors that several matmuls read have the slot of the first one.
    """

    module: str
    ordinal: int
    role: Role
    part: int | None = None  # of a stack of products: which

    @property
    def direction(self) -> str:
        """In which pass its amax becomes known."""
        return BACKWARD if self.role is Role.GRAD_OUTPUT else FORWARD

    def __str__(self) -> str:
        part = "" if self.part is None else f"[{self.part}]"
        return f"{self.module}#{self.ordinal}.{self.role}{part}"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a slot lies: a row of a page. A page is a handful of tensors (``FIELDS``) for many slots."""

    page: int
    row: int


class SlotPool(Protocol):
    """What passes ask of the state; ``fp8_compile.scaling_state`` answers."""

    def place(self, slot: Slot) -> Place:
        """The place of a slot, a new one if it has none."""
        ...


def buffer_name(direction: str, page: int, field: str) -> str:
    """What a tensor of the state is called in a graph."""
    return f"fp8_{direction}_{page}_{field}"


def state_of(graph: fx.Graph) -> dict[str, fx.Node]:
    """The placeholders of a graph that hold the state, by the names that the backend gave them."""
    named = {}
    for node in graph.find_nodes(op="placeholder"):
        target = getattr(node.meta.get("desc"), "target", None)
        if isinstance(target, str) and target.startswith((f"fp8_{FORWARD}_", f"fp8_{BACKWARD}_")):
            named[target] = node
    return named
