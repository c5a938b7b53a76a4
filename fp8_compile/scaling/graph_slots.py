"""The part of a model's scaling state that one graph is compiled with."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Container, Iterable

import torch
from torch import Tensor, fx

from fp8_compile.config import Config
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.graph.slot import BACKWARD, FORWARD, FROZEN, Place, Slot, TensorUse, buffer_name
from fp8_compile.passes.graph.update_rule import UpdateRule
from fp8_compile.torch_internals.dynamo import compilation, frame_key

from .table import Table, TableKind

if TYPE_CHECKING:
    from .state import ScalingState


log = logging.getLogger("fp8_compile")

LEAST_ROWS = 32  # of a table
# Ops of a Dynamo graph that become matmuls, by a part of their name.
MATMULS = ("linear", "matmul", "mm", "einsum", "attention", "tensordot", "multi_head", "lstm", "gru", "rnn", "bilinear")
SLOTS_PER_MATMUL = 4  # two operands in forward, seldom more than one gradient, and some to spare


class PoolFull(Exception):
    """A graph has more quantized tensors than was foreseen: ``needed`` rows would do."""

    def __init__(self, direction: str, needed: int) -> None:
        super().__init__(direction, needed)
        self.direction, self.needed = direction, needed


class GraphPool:
    """The slots of one graph: places in tables of the model's state. ``buffers`` are the tensors that it is given.

    ``frame`` is the piece of the model's code that the graph was made of: graphs for other sizes come from the same
    frame and have the same slots, those on the other side of a graph break from another one. A pool with tables of
    frozen scales alone is for inference; it has places for inputs whose scales are frozen.
    """

    def __init__(
        self,
        state: ScalingState,
        kinds: Iterable[TableKind],
        room: int,
        modules: Container[str] = (),
        frame: str = "",
    ) -> None:
        """``room``: how many slots the graph may need. A graph whose ``modules`` have slots already, from a graph for
        other sizes, will hardly need new ones."""
        self.state, self.frame, self.places = state, frame, dict[Slot, Place]()
        self._uses: dict[TensorUse, Slot] = {}
        self._kinds = {kind.direction: kind for kind in kinds}
        self._tables: dict[str, list[int]] = {}
        for kind in self._kinds.values():
            tables = [index for index, table in enumerate(state.tables) if table.kind == kind]
            known = any(slot.layer in modules for index in tables for slot in state.tables[index].slots)
            self._tables[kind.direction] = tables
            self.make_room(kind.direction, 0 if known else room)
        given = {index: state.tables[index] for index in sum(self._tables.values(), [])}
        rows = [(index, table.capacity, table.slots) for index, table in given.items()]
        self.fingerprint = repr((frame, state.uses, rows, sorted(state.frozen or ()) if self.frozen else ()))

    @property
    def frozen(self) -> bool:
        """True if the graph only reads scales that the user has fixed."""
        return FROZEN in self._kinds

    def make_room(self, direction: str, room: int) -> None:
        """Add a table unless the last one has that many rows left. It has room for several graphs: those on the two
        sides of a graph break give each other room after a jump only if they share a table."""
        kind, tables = self._kinds[direction], self._tables[direction]
        last = self.state.tables[tables[-1]] if tables else None
        if last is None or last.capacity - len(last.slots) < room:
            self.state.tables.append(Table(kind, max(LEAST_ROWS, 2 * room), self.state.unit(kind.direction)))
            tables.append(len(self.state.tables) - 1)

    def buffers(self, fields: Iterable[str]) -> dict[str, Tensor]:
        """Name in the graph -> tensor."""
        return {
            buffer_name(direction, index, field): getattr(self.state.tables[index], field)
            for direction, tables in self._tables.items()
            for index in tables
            for field in fields
        }

    def tables(self, direction: str) -> list[int]:
        """The tables that the graph is given."""
        return self._tables.get(direction, [])

    def direction(self, tensor: TensorUse) -> str:
        return FROZEN if self.frozen else tensor.direction

    def slot_of(self, tensor: TensorUse) -> Slot:
        """The slot of a tensor of this graph."""
        slot = self.state.slot_of(tensor, self.frame)
        other = next((use for use, its in self._uses.items() if its == slot and use != tensor), None)
        assert other is None, f"{slot} would stand for two tensors of one graph: {other} and {tensor}"
        return slot

    def place(self, tensor: TensorUse) -> Place | None:
        slot = self.slot_of(tensor)
        if self.frozen and self.state.frozen_reach(slot) is None:
            if tensor.role is Role.INPUT:
                log.warning("%s has no frozen scale: it takes its own, as without freeze_scales()", slot)
            return None
        self._uses[tensor] = slot
        place = self.place_of(slot, self.direction(tensor))
        if place is None:
            direction = self.direction(tensor)
            index = self._tables[direction][-1]
            table = self.state.tables[index]
            if len(table.slots) == table.capacity:
                raise PoolFull(direction, table.capacity)
            place = self.places[slot] = Place(index, table.add(slot))
            self.state.fill(slot, tensor, table, place.row)
        return place

    def place_of(self, slot: Slot, direction: str) -> Place | None:
        """Where a slot is, if it has a place already."""
        for index in self._tables[direction]:
            table = self.state.tables[index]
            if slot in table.slots:
                self.places[slot] = Place(index, table.slots.index(slot))
                return self.places[slot]
        return None

    def names(self) -> dict[str, str]:
        """Tensor of the graph -> the name of its slot."""
        return {str(use): str(slot) for use, slot in self._uses.items()}

    def to_list(self) -> list[Any]:
        """Plain data for the report cache: what a graph from Inductor's cache has built in."""
        places = {use: self.places[slot] for use, slot in self._uses.items()}
        return [[*dataclasses.astuple(use), *dataclasses.astuple(place)] for use, place in places.items()]

    def adopt(self, stored: Iterable[Any]) -> None:
        """Take the places that code from Inductor's cache was compiled with."""
        for *use, table, row in stored:
            given = self.place(use_from_list(use))
            assert given == Place(table, row), "the cache's key covers the places of all slots"


def open_pool(
    gm: fx.GraphModule,
    modules: Container[str],
    config: Config,
    rules: Rules,
    device: torch.device,
    state: ScalingState,
    *,
    trains: bool,
) -> GraphPool:
    """The slots for a graph of these modules, with room for those it may need. One that does not train has frozen
    scales alone."""
    room = SLOTS_PER_MATMUL * max(1, _matmuls(gm))
    frame = state.begin_graph(frame_key(), compilation())
    return GraphPool(state, _kinds(config, rules, device, trains), room, modules, frame)


def update_rule(config: Config) -> UpdateRule:
    return UpdateRule(config.margin, config.amax_algorithm, config.scale_update_interval)


def _kinds(config: Config, rules: Rules, device: torch.device, trains: bool) -> list[TableKind]:
    formats = {FORWARD: rules.forward, BACKWARD: rules.backward} if trains else {FROZEN: rules.forward}
    return [
        TableKind(direction, device, config.amax_history_len, format.max, update_rule(config))
        for direction, format in formats.items()
    ]


def _matmuls(gm: fx.GraphModule) -> int:
    """How many matmuls a Dynamo graph may have, its subgraphs included."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    names = (str(node.target).lower() for graph in graphs for node in graph.nodes if node.op.startswith("call"))
    return sum(any(part in name for part in MATMULS) for name in names)


def use_from_list(fields: list[Any]) -> TensorUse:
    """A :class:`TensorUse` that was stored as plain data."""
    module, parameter, line, ordinal, role, part, number = fields
    return TensorUse(module, parameter, line, ordinal, Role(role), part, number)
