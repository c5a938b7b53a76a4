"""The slots of one graph: while it is compiled, places for its tensors; afterwards, what they are for a module."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from typing import TYPE_CHECKING, Any, Container, Iterable, Iterator

import torch
from torch import Tensor, fx

from fp8_compile.config import Config
from fp8_compile.kernels.delayed_scaling import STATS_FIELDS, STEADY
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.rules import Rules
from fp8_compile.passes.graph.slot import BACKWARD, FIELDS, FORWARD, FROZEN, STATS, Place, TensorUse, state_input
from fp8_compile.passes.graph.update_rule import UpdateRule
from fp8_compile.torch_internals.dynamo import compilation, frame_code, frame_key, frame_module, modules_read
from fp8_compile.torch_internals.modules import unwrap

from .layout import Layout, Prefix, layout_of, moved, operand_of
from .table import TableKind

if TYPE_CHECKING:
    from .state import ScalingState


log = logging.getLogger("fp8_compile")

# Ops of a Dynamo graph that become matmuls, by a part of their name.
MATMULS = ("linear", "matmul", "mm", "einsum", "attention", "tensordot", "multi_head", "lstm", "gru", "rnn", "bilinear")
SLOTS_PER_MATMUL = 4  # two operands in forward, seldom more than one gradient, and some to spare


class GraphSlots:
    """Places in the layout of the graph's frame, for the tensors that passes ask about. A layout with tables of frozen
    scales alone is for inference; then there are places for inputs whose scales are frozen."""

    def __init__(
        self, layout: Layout, state: ScalingState, prefix: Prefix, *, room: int, stats: bool = False
    ) -> None:
        """``room``: how many slots the graph may need. ``state``, ``prefix``: of the module that it is compiled for."""
        self.layout, self._state, self.prefix = layout, weakref.ref(state), prefix
        self.fields = (*FIELDS, STATS) if stats else FIELDS
        self.uses: dict[TensorUse, Place] = {}
        known = bool(layout.tables)  # a graph for other sizes was there: this one will hardly need new slots
        for direction in layout.kinds:
            layout.make_room(direction, 0 if known else room)
        self.given = list(range(len(layout.tables)))  # tables that the code gets; others may come later

    @property
    def state(self) -> ScalingState:
        """That of the module that the graph is compiled for. Code is for others too, and keeps none alive."""
        state = self._state()
        assert state is not None, "the state of a module that is compiled is there"
        return state

    @property
    def frozen(self) -> bool:
        """True if the graph only reads scales that the user has fixed."""
        return FROZEN in self.layout.kinds

    @property
    def fingerprint(self) -> str:
        """What code depends on, but for the places that its tensors get."""
        frozen = sorted(map(self.prefix.local, self.state.frozen or ())) if self.frozen else ()
        return repr((self.layout.sizes, self.fields, frozen))

    def make_room(self, direction: str, room: int) -> None:
        """Add a table: the graph is compiled once more."""
        self.layout.make_room(direction, room)
        self.given = list(range(len(self.layout.tables)))
        self.uses.clear()

    def direction(self, tensor: TensorUse) -> str:
        return FROZEN if self.frozen else tensor.direction

    def place(self, tensor: TensorUse) -> Place | None:
        operand = operand_of(tensor, self.prefix)
        other = next((use for use in self.uses if use != tensor and operand_of(use, self.prefix) == operand), None)
        assert other is None, f"{operand} would stand for two tensors of one graph: {other} and {tensor}"
        if self.frozen:
            slot = self.state.slot_of(tensor, self.layout.frame)
            if self.state.frozen_reach(slot) is None:
                if tensor.role is Role.INPUT:
                    log.warning("%s has no frozen scale: it takes its own, as without freeze_scales()", slot)
                return None
        self.uses[tensor] = self.layout.place(operand, self.direction(tensor))
        return self.uses[tensor]

    def examples(self, device: torch.device) -> dict[str, Tensor]:
        """Name in the graph -> a tensor like those that the code will be given."""
        found = {}
        for name, index, field in self._inputs():
            rows, length = self.layout.tables[index].capacity, self.layout.tables[index].kind.length
            shapes: dict[str, tuple[int, ...]] = {"amaxes": (rows,), "history": (rows, length), "scales": (2, rows)}
            shapes |= {"counts": (STEADY + 1, rows), "room": (1,), STATS: (rows, STATS_FIELDS)}
            dtype = {"counts": torch.int32, "room": torch.int32, STATS: torch.float64}.get(field, torch.float32)
            found[name] = torch.empty(shapes[field], dtype=dtype, device=device)
        return found

    def _inputs(self) -> Iterator[tuple[str, int, str]]:
        for index in self.given:
            for field in self.fields:
                yield state_input(self.layout.tables[index].kind.direction, index, field), index, field

    def bound(self, state: ScalingState, prefix: Prefix, *, besides: Container[TensorUse] = ()) -> BoundSlots:
        """The slots as a module has them, but for tensors that are quantized elsewhere."""
        tables = state.tables_for(self.layout, prefix)
        inputs = [getattr(state.tables[tables[index]], field) for _, index, field in self._inputs()]
        bound = BoundSlots(state, {}, inputs, frozen=self.frozen)
        for use, place in self.uses.items():
            if use in besides:
                continue
            own, at = moved(use, self.prefix, prefix), Place(tables[place.table], place.row)
            slot = state.slot_of(own, self.layout.frame)
            state.occupy(slot, own, at)
            bound.places[slot] = at
        return bound

    def names(self) -> dict[str, str]:
        """Tensor of the graph -> the name of its slot in the module that it is compiled for."""
        return {str(use): str(self.state.slot_of(use, self.layout.frame)) for use in self.uses}

    def to_list(self) -> list[Any]:
        """Plain data for the report cache: what a graph from Inductor's cache has built in."""
        return [[*dataclasses.astuple(use), *dataclasses.astuple(place)] for use, place in self.uses.items()]

    def may_adopt(self, stored: Iterable[Any]) -> bool:
        """True if code from Inductor's cache was compiled with places that are right here, too: each is taken by the
        same tensor or free."""
        return all(
            self.layout.may_have(operand_of(TensorUse.from_list(use), self.prefix), Place(table, row))
            for *use, table, row in stored
        )

    def adopt(self, stored: Iterable[Any]) -> None:
        """Take the places that code from Inductor's cache was compiled with."""
        for *fields, table, row in stored:
            use = TensorUse.from_list(fields)
            self.layout.put(operand_of(use, self.prefix), Place(table, row))
            self.uses[use] = Place(table, row)


@dataclasses.dataclass
class BoundSlots:
    """The slots of one graph for one module that runs it; ``inputs`` are the tensors that the code is given."""

    state: ScalingState
    places: dict[Any, Place]
    inputs: list[Tensor]
    frozen: bool = False


def open_slots(
    gm: fx.GraphModule,
    config: Config,
    rules: Rules,
    device: torch.device,
    state: ScalingState,
    prefix: str,
    *,
    trains: bool,
) -> GraphSlots:
    """The slots for a graph, with room for those it may need. One that does not train has frozen scales alone."""
    room = SLOTS_PER_MATMUL * max(1, _matmuls(gm))
    code = frame_code()
    frame = state.begin_graph(frame_key(), compilation())
    _, module = frame_module()
    modules = [module] if module is not None else list(modules_read(gm).values())
    parameters = tuple(name for module in modules for name, _ in unwrap(module).named_parameters())
    layout = layout_of(code, frame, _kinds(config, rules, device, trains), parameters)
    return GraphSlots(layout, state, Prefix(prefix), room=room, stats=config.stats)


def update_rule(config: Config) -> UpdateRule:
    if not config.delays:
        return UpdateRule(algorithm="frozen")  # amaxes are recorded for stats; there is no scale that could be stale
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
