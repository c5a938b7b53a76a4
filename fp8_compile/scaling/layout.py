"""Which rows of which tables the quantized tensors of a frame have.

A frame is a piece of the user's code that Dynamo compiles: a ``forward``, or what comes after a graph break in one.
Code is compiled with rows fixed. Each module that runs the frame has tables of its own for it (``state.py``), so that
one code serves all of them. Graphs of one frame for other sizes have the same rows for the same tensors.
"""

from __future__ import annotations

import dataclasses
import weakref
from types import CodeType
from typing import Any, Iterable

from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.slot import Place, TensorUse

from .table import TableKind

LEAST_ROWS = 32  # of a table


class LayoutFull(Exception):
    """A graph has more quantized tensors than was foreseen: ``needed`` rows would do."""

    def __init__(self, direction: str, needed: int) -> None:
        super().__init__(direction, needed)
        self.direction, self.needed = direction, needed


@dataclasses.dataclass(frozen=True)
class Operand:
    """A quantized tensor as all modules that run a frame have it: ``product`` is named as in the frame's module."""

    product: str
    line: str
    ordinal: int
    role: Role
    part: int | None


@dataclasses.dataclass(eq=False)
class Rows:
    """One table: whose its rows are."""

    kind: TableKind
    capacity: int
    operands: dict[int, Operand] = dataclasses.field(default_factory=dict)


class Layout:
    """The tables of a frame. It only grows, since there is code that was compiled with it."""

    def __init__(self, frame: str, kinds: Iterable[TableKind]) -> None:
        self.frame, self.kinds = frame, {kind.direction: kind for kind in kinds}
        self.tables: list[Rows] = []

    def of(self, direction: str) -> list[int]:
        """The numbers of the tables of a direction."""
        return [index for index, table in enumerate(self.tables) if table.kind.direction == direction]

    def make_room(self, direction: str, room: int) -> None:
        """Add a table unless the last one of the direction has that many rows left."""
        numbers = self.of(direction)
        last = self.tables[numbers[-1]] if numbers else None
        if last is None or last.capacity - len(last.operands) < room:
            self.tables.append(Rows(self.kinds[direction], max(LEAST_ROWS, room)))

    def place(self, operand: Operand, direction: str) -> Place:
        """The place of a tensor, a new one if it has none."""
        known = self._find(operand, direction)
        if known is not None:
            return known
        newest = self.of(direction)[-1]
        rows = self.tables[newest]
        free = next((row for row in range(rows.capacity) if row not in rows.operands), None)
        if free is None:
            raise LayoutFull(direction, rows.capacity)
        rows.operands[free] = operand
        return Place(newest, free)

    def _find(self, operand: Operand, direction: str) -> Place | None:
        for index in self.of(direction):
            for row, known in self.tables[index].operands.items():
                if known == operand:
                    return Place(index, row)
        return None

    def may_have(self, operand: Operand, at: Place) -> bool:
        """True if a tensor is at that place, or can be."""
        if at.table >= len(self.tables) or at.row >= self.tables[at.table].capacity:
            return False
        known = self._find(operand, self.tables[at.table].kind.direction)
        return known == at if known is not None else at.row not in self.tables[at.table].operands

    def put(self, operand: Operand, at: Place) -> None:
        self.tables[at.table].operands[at.row] = operand

    @property
    def sizes(self) -> str:
        """What the tables are, whatever is in them."""
        return repr((self.frame, [(rows.kind, rows.capacity) for rows in self.tables]))

    @property
    def fingerprint(self) -> str:
        """The tables and what is in them."""
        return repr((self.sizes, [sorted(rows.operands.items()) for rows in self.tables]))


def layout_of(
    code: CodeType | None, frame: str, kinds: Iterable[TableKind], parameters: tuple[str, ...] = ()
) -> Layout:
    """The layout for a frame that runs for modules with these parameters: all models that are an ``nn.Sequential`` have
    one ``forward``. ``code``: None where a backend is called by hand."""
    kinds = tuple(kinds)
    known = _by_code.setdefault(code, {}) if code is not None else {}
    return known.setdefault((frame, kinds, parameters), Layout(frame, kinds))


_by_code: weakref.WeakKeyDictionary[CodeType, dict[Any, Layout]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Prefix:
    """What the module of a frame is called in the model: "blocks.0", or "" for the model itself.

    In the frame's module "blocks.0.up.weight" is "up.weight"; what is outside it keeps its name, after a slash.
    """

    name: str

    def local(self, name: str) -> str:
        if not self.name:
            return name
        return name[len(self.name) + 1 :] if self.covers(name) else f"/{name}"

    def covers(self, name: str) -> bool:
        return f"{name}.".startswith(f"{self.name}.") if self.name else True

    def whole(self, local: str) -> str:
        """The name in the model again."""
        if local.startswith("/"):
            return local[1:]
        return ".".join(part for part in (self.name, local) if part)


def operand_of(use: TensorUse, prefix: Prefix) -> Operand:
    return Operand(prefix.local(use.product), use.line, use.ordinal, use.role, use.part)


def moved(use: TensorUse, prefix: Prefix, to: Prefix) -> TensorUse:
    """The same tensor of another module that runs the frame."""
    if prefix == to:
        return use
    parameter = to.whole(prefix.local(use.parameter)) if use.parameter else ""
    return dataclasses.replace(use, module=to.whole(prefix.local(use.module)), parameter=parameter)
