"""Where delayed scaling keeps what it knows of a tensor: in a slot, of which a model has a pool."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Sequence

from torch import fx

from fp8_compile.torch_internals.aot import named_inputs

from .matmul import Matmul
from .roles import Role, is_backward

FORWARD, BACKWARD, FROZEN = "forward", "backward", "frozen"
FIELDS = ("amaxes", "history", "scales", "counts", "room")  # of a table, in the order in which ops take them
STATS = "stats"  # one more, where statistics are asked for


@dataclasses.dataclass(frozen=True)
class TensorUse:
    """One quantized tensor as one graph knows it: an operand of a matmul. A tensor that several matmuls read is known
    by the first one."""

    module: str  # the module that wrote the matmul
    parameter: str  # the parameter that the matmul multiplies by; "" if there is none
    line: str  # the line of code that wrote it, with its callers
    ordinal: int  # which of the matmuls with that parameter on that line it is
    role: Role
    part: int | None = None  # which product of a stack it is
    number: int = 0  # which of the module's matmuls in this graph it is: slots were named so before version 0.2

    @classmethod
    def from_list(cls, fields: Sequence[Any]) -> TensorUse:
        """Of what ``dataclasses.astuple`` and JSON have made of one."""
        module, parameter, line, ordinal, role, part, number = fields
        return cls(module, parameter, line, ordinal, Role(role), part, number)

    @property
    def direction(self) -> str:
        """The half of a step, forward or backward, in which its amax becomes known."""
        return BACKWARD if self.role is Role.GRAD_OUTPUT else FORWARD

    @property
    def product(self) -> str:
        """The name of the matmul, the same in all graphs."""
        return self.parameter or f"{self.module}.{WITHOUT_PARAMETER}".lstrip(".")

    @property
    def old_name(self) -> str:
        return f"{self.module}#{self.number}.{_operand(self.role, self.part)}"


@dataclasses.dataclass(frozen=True)
class Slot:
    """What the state remembers of a tensor: the ``use``-th use of a parameter in all graphs of a model, and the role of
    the tensor in it."""

    product: str
    use: int
    role: Role
    part: int | None = None

    @property
    def layer(self) -> str:
        """The module that does the product."""
        return self.product.rpartition(".")[0]

    def __str__(self) -> str:
        """``blocks.0.up#0.input``: a weight called ``weight`` has the name of its layer."""
        short = self.layer if self.product.rpartition(".")[2] == "weight" else self.product
        return f"{short}#{self.use}.{_operand(self.role, self.part)}"


WITHOUT_PARAMETER = "matmul"  # the last part of the name of a product that has no parameter


def _operand(role: Role, part: int | None) -> str:
    return str(role) if part is None else f"{role}[{part}]"


def tensor_use(site: Matmul, role: Role, part: int | None = None) -> TensorUse:
    """An operand of a matmul, as the state is asked for it."""
    return TensorUse(site.module, site.parameter, site.line, site.ordinal, role, part, site.number)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a slot is stored: a row of a table. A table is a handful of tensors (``FIELDS``) for many slots."""

    table: int
    row: int


class SlotPool(Protocol):
    """What passes ask of the state; ``fp8_compile.scaling`` answers."""

    def place(self, tensor: TensorUse) -> Place | None:
        """The place of a tensor's slot; a tensor without a slot gets one. None: the tensor takes its own scale."""
        ...

    def direction(self, tensor: TensorUse) -> str:
        """The direction of the table that the tensor's slot is in."""
        ...


def state_input(direction: str, table: int, field: str) -> str:
    """The name of one of the state's tensors in a graph."""
    return f"fp8_{direction}_{table}_{field}"


def state_of(graph: fx.Graph) -> dict[str, fx.Node]:
    """The placeholders of a graph that hold the state, by the names that the backend gave them: in a graph that trains,
    the state of training; in others, that of frozen scales."""
    directions = (FORWARD, BACKWARD) if any(is_backward(node) for node in graph.nodes) else (FROZEN,)
    prefixes = tuple(f"fp8_{direction}_" for direction in directions)
    return {name: node for name, node in named_inputs(graph).items() if name.startswith(prefixes)}
