"""What delayed scaling remembers of a model: one pool of amax histories and scales, shared by all its graphs.

A slot is one quantized tensor, named ``blocks.0.mlp.up#0.input``: the parameter that it is multiplied by (or is), which
use of that parameter it belongs to, over all graphs of the model, and the role of the tensor. Slots are rows of tables
(``table.py``). Code is compiled with rows fixed (``layout.py``) and given the tables of the module that it runs for.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Mapping, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fp8_compile.kernels.delayed_scaling import QUANT, RUNS
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.slot import BACKWARD, FROZEN, Place, Slot, TensorUse
from fp8_compile.torch_internals.dynamo import reset_code
from fp8_compile.torch_internals.graphs import real_tensors

from . import precision
from .frozen_reach import reach_of
from .layout import Layout, Prefix
from .model_state import model_state, scaling_states
from .recorder import RunRecorder
from .requests import Changes, Requests
from .saved_slots import Row, SavedSlots, check_fits, read_slots
from .stats import StatsTable, in_words, stats_row
from .table import Table, TableKind

if TYPE_CHECKING:
    from .weight_cache import WeightCache


class KnowsAmaxes(Protocol):
    """What :meth:`ScalingState.prime` asks of ``fp8_compile.calibrate``'s result."""

    def amax(self, name: str) -> float | Tensor:
        """The largest magnitude that a module's input had; KeyError or ValueError for one that was not looked at."""
        ...


class ScalingState:
    """The state of one model. :func:`fp8_compile.scaling_state` finds it."""

    def __init__(
        self,
        model: nn.Module | None = None,
        requests: Requests | None = None,
        *,
        several: Iterable[nn.Module] = (),
        code: CodeType | None = None,
    ) -> None:
        """``requests``: what training loops ask of the model's state. Of a function that runs no model of its own:
        ``several``, the modules that it runs; ``code``, where it runs none."""
        self._several = [weakref.ref(module) for module in several]
        self._code = weakref.ref(code) if code is not None else None
        self._requests = requests or Requests()
        self._model = weakref.ref(model) if model is not None else None
        self.tables: list[Table] = []
        self._places: dict[tuple[Slot, bool], Place] = {}  # of each slot, and whether its scale is frozen
        self._rooms: dict[Any, Tensor] = {}
        self._of_layout: dict[tuple[Layout, Prefix], list[int]] = {}  # the tables of a module that runs a frame
        self._saved = SavedSlots()  # loaded, for slots that no graph has asked for yet
        self.recorders: list[RunRecorder] = []  # of graphs that are dumped with stats
        self._calibration: KnowsAmaxes | None = None
        self.uses: dict[str, list[tuple[str, str, int]]] = {}  # by parameter or product: frame, line, ordinal of each
        self._looked: tuple[int, set[Slot]] = (-1, set())  # the epoch, and slots of graphs that have finished looking
        self._parts: dict[str, tuple[Any, int]] = {}  # frame -> its newest compilation, and how many graphs that made
        self.frozen: dict[str, float] | None = None  # by slot or layer: up to which magnitude inference holds inputs
        self.gradient_unit = 1.0  # the loss scale: gradients inside graphs are that many times as large
        self.steps: int | None = None  # of the optimizer; None: no one counts them
        self.epoch = 0  # goes up when histories are replaced: what relied on them has to look again
        self.updates = 0  # of all tables at once, where amaxes are held until the optimizer's step
        self._weights: WeightCache | None = None
        self.runs_before: dict[Slot, int] | None = None  # of each slot, when gemms went to high precision
        scaling_states.add(self)

    def settle(self) -> None:
        """Bring histories and scales up to date with the last run."""
        for index in range(len(self.tables)):
            self.settle_table(index)

    def settle_table(self, index: int) -> None:
        if not self.held:
            self.tables[index].settle()

    @property
    def model(self) -> nn.Module | None:
        return self._model() if self._model is not None else None

    @property
    def models(self) -> list[nn.Module]:
        """The model, or the modules of a function that runs several."""
        return [one for ref in (self._model, *self._several) if ref is not None and (one := ref()) is not None]

    @property
    def held(self) -> bool:
        """True if amaxes wait for :meth:`update`; otherwise each run begins with the update for the one before."""
        return self._requests.held

    def update(self) -> None:
        """Take over the amaxes that were held."""
        for table in self.tables:
            table.settle()
            increment_version(table.scales)  # a forward saved them as they were: its backward must not read others
        self.updates += 1

    @property
    def weights(self) -> WeightCache | None:
        """FP8 copies of the model's weights, where an optimizer is attached."""
        if not self._requests.cached:
            self._weights = None
        elif self._weights is None:
            self._weights = self.new_weights()
        return self._weights

    def new_weights(self) -> WeightCache:
        from .weight_cache import WeightCache  # it hooks into every optimizer, so only where it is used

        return WeightCache(self)

    def unit(self, direction: str) -> float:
        """By how much graphs multiply the tensors whose amaxes become known in that direction."""
        return self.gradient_unit if direction == BACKWARD else 1.0

    def set_gradient_unit(self, unit: float) -> None:
        """The loss scale has changed: bring what is known of gradients to the new unit, exactly for powers of two."""
        if unit != self.gradient_unit:
            self.gradient_unit = unit
            for table in self.tables:
                if table.kind.direction == BACKWARD:
                    table.set_unit(unit)

    def add_table(self, kind: TableKind, capacity: int, ordinal: int = 0) -> int:
        """A new table; its number. Those of all graphs that are the first of their direction there, or the second, have
        a common room: a jump goes through the whole model."""
        with real_tensors():  # also while a graph is compiled
            key = kind.direction, kind.device, kind.largest, ordinal
            if key not in self._rooms:
                self._rooms[key] = torch.zeros(1, dtype=torch.int32, device=kind.device)
            self.tables.append(Table(kind, capacity, self.unit(kind.direction), self._rooms[key]))
        return len(self.tables) - 1

    def tables_for(self, layout: Layout, prefix: Prefix) -> list[int]:
        """The tables of a module that runs a frame, as many as its layout has by now."""
        tables = self._of_layout.setdefault((layout, prefix), [])
        for number in range(len(tables), len(layout.tables)):
            kind = layout.tables[number].kind
            ordinal = layout.of(kind.direction).index(number)  # a graph must not be given one tensor twice
            tables.append(self.add_table(kind, layout.tables[number].capacity, ordinal))
        return tables

    def occupy(self, slot: Slot, tensor: TensorUse, at: Place) -> None:
        """A slot has that place from now on, with what is known of it: where it was until now, loaded or calibrated."""
        table = self.tables[at.table]
        key = slot, table.kind.direction == FROZEN
        before = self._places.get(key)
        if before == at:
            return
        with torch.no_grad():
            table.put(at.row, slot)
            there = self.tables[before.table] if before is not None else None
            if before is not None and there is not None:
                there.slots.pop(before.row)
            if before is not None and there is not None and there.kind == table.kind:
                table.set_row(at.row, there.row(before.row))
            else:
                self._fill(slot, tensor, table, at.row)
        self._places[key] = at

    def place_of(self, slot: Slot) -> Place | None:
        """Where training keeps a slot."""
        return self._places.get((slot, False))

    def scale_of(self, slot: Slot) -> Tensor | None:
        """The quant_scale of what forward quantizes, as the next training run will use it, fp32 []; None where no amax
        has entered."""
        place = self.place_of(slot)
        if place is None:
            return None
        self.settle_table(place.table)
        scale = self.tables[place.table].scales[QUANT, place.row].clone()
        return scale if float(scale) > 0 else None

    def slots(self) -> Iterator[tuple[Slot, Place]]:
        """Every slot and its place."""
        return ((slot, place) for (slot, _), place in self._places.items())

    def trained(self) -> Iterator[tuple[Slot, Place]]:
        """Those that training writes, and that are saved."""
        return ((slot, place) for slot, place in self.slots() if self.tables[place.table].kind.direction != FROZEN)

    def slot_of(self, tensor: TensorUse, frame: str) -> Slot:
        """The slot of a tensor of a graph that was made of a frame: the same for the same line of the same frame."""
        uses = self.uses.setdefault(tensor.product, [])
        use = (frame, tensor.line, tensor.ordinal)
        if use not in uses:
            uses.append(use)
        return Slot(tensor.product, uses.index(use), tensor.role, tensor.part)

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors: ``<slot>.scale``, ``.amax_history``, ``.counts`` and ``.largest``, copies of the state."""
        self.settle()
        rows = {str(slot): self.tables[place.table].row(place.row) for slot, place in self.trained()}
        rows = self._saved.waiting | rows
        saved = {f"{slot}.{field}": tensor for slot, row in rows.items() for field, tensor in row.items()}
        return saved | precision.saved_precision(self.model)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take a saved state over, before or after the model is compiled. One that does not fit changes nothing."""
        self.checked(state_dict)()

    def checked(self, state_dict: Mapping[str, Tensor]) -> Callable[[], None]:
        """Raise where a saved state does not fit; the function that is returned takes it over. To load several states,
        check all of them first."""
        places = {str(slot): place for slot, place in self.trained()}
        slots, high = dict[str, Tensor](), dict[str, Tensor]()
        for key, tensor in state_dict.items() if isinstance(state_dict, Mapping) else ():
            (high if precision.is_precision(key) else slots)[key] = tensor
        wanted = precision.read_precision(self.model, high)
        rows = self._saved.renamed(read_slots(slots if isinstance(state_dict, Mapping) else state_dict), places)
        check_fits(rows, {slot: self.tables[place.table].kind.length for slot, place in places.items()}, self.model)
        return lambda: self._take_over(rows, places, wanted)

    def _take_over(
        self, rows: Mapping[str, Row], places: Mapping[str, Place], wanted: Mapping[nn.Module, frozenset[str]]
    ) -> None:
        precision.switch(wanted)
        for slot, row in rows.items():
            if slot in places:
                self.tables[places[slot].table].set_row(places[slot].row, row)
        self._saved.waiting = {slot: row for slot, row in rows.items() if slot not in places}
        self.runs_before = precision.runs_by_slot(self) if any(wanted.values()) else None
        self.epoch += 1

    def prime(self, calibration: KnowsAmaxes) -> None:
        """Let inputs begin with the amaxes of a calibration, as if a run had seen them: of slots that are there, and
        of those that graphs will ask for."""
        self._calibration = calibration
        inputs = [(slot, place) for slot, place in self.trained() if slot.role is Role.INPUT]
        primed = [self._prime(slot, self.tables[place.table], place.row) for slot, place in inputs]
        if inputs and not any(primed):
            names = ", ".join(sorted({slot.layer for slot, _ in inputs})[:5])
            raise ValueError(
                f"the calibration knows none of the model's quantized inputs ({names}); expected one of the same model"
            )

    def _prime(self, slot: Slot, table: Table, row: int) -> bool:
        if self._calibration is None or slot.role is not Role.INPUT:
            return False
        try:
            amax = float(self._calibration.amax(slot.layer))
        except (KeyError, ValueError):  # not a module that was calibrated: a matmul outside any layer
            return False
        table.prime(row, amax)
        return True

    def freeze(self, reach: Mapping[str, float]) -> None:
        """Let inference quantize inputs with fixed scales, which reach to these magnitudes, by slot or layer."""
        self.frozen = dict(reach)
        for slot, place in self.slots():
            table = self.tables[place.table]
            if table.kind.direction == FROZEN and (limit := self.frozen_reach(slot)) is not None:
                table.freeze(place.row, limit, exactly=slot.role is Role.WEIGHT)
        self._mark_frozen()

    def unfreeze(self) -> None:
        """Let inference take each input's scale from the input itself again."""
        self.frozen = None
        self._mark_frozen()

    def _mark_frozen(self) -> None:
        """Tell each module of the model which scales in it are frozen: code for it is compiled accordingly."""
        Changes.note()
        for name, module in self.model.named_modules() if self.model is not None else ():
            prefix = Prefix(name)
            within = [prefix.local(one) for one in self.frozen or () if prefix.covers(one.partition("#")[0])]
            model_state(module).frozen = frozenset(within)
        for module in (found for one in self._several if (found := one()) is not None):
            model_state(module).frozen = frozenset(self.frozen or ())
        if self._code is not None and (code := self._code()) is not None:
            reset_code(code)  # there is no module that a guard could ask

    def frozen_reach(self, slot: Slot) -> float | None:
        """The magnitude that the frozen scale of an input or a weight reaches to; None: its scale is not frozen."""
        if slot.role is Role.GRAD_OUTPUT or self.frozen is None:
            return None
        return reach_of(slot, self.frozen)

    def begin_graph(self, frame: str, compilation: Any) -> str:
        """A name for the graph that a compilation makes of a frame: the frame's; where one compilation makes several
        graphs, as DDP's buckets do, each has its own."""
        before, made = self._parts.get(frame, (lambda: None, 0))
        made = made + 1 if compilation is not None and before() is compilation else 1
        self._parts[frame] = (weakref.ref(compilation) if compilation is not None else before, made)
        return frame if made == 1 else f"{frame} part {made}"

    def reset(self) -> None:
        """Forget all histories, as when weights or data are replaced by very different ones: the next run takes each
        tensor's scale from the tensor itself, as the first one did."""
        for table in self.tables:
            if table.kind.direction != FROZEN:
                table.clear()
        self._saved.waiting.clear()
        self._calibration = None
        self.epoch += 1

    def stats(self) -> StatsTable:
        """One row per slot: what was saturated, what was flushed to zero, amax, scale, signal to quantization noise."""
        self.settle()
        places = [(slot, self.tables[place.table], place.row) for slot, place in self.slots()]
        return StatsTable([stats_row(self._shown(slot, table), table, row) for slot, table, row in places])

    @staticmethod
    def _shown(slot: Slot, table: Table) -> str:
        return f"{slot} (frozen)" if table.kind.direction == FROZEN else str(slot)

    def __repr__(self) -> str:
        """What a user wants to know first: how many tensors there are, and which of them lost numbers."""
        return in_words(self.stats())

    def reset_stats(self) -> None:
        """Count from zero; scales and histories stay."""
        for table in self.tables:
            table.stats.data.zero_()

    def record(self, step: int | None = None) -> None:
        """Write amaxes, scales and counts of now to the dump folders, for the charts of their reports; ``step`` is what
        the charts call this moment. Does nothing unless both ``stats`` and ``dump`` are on.

        Without it every run of a graph is recorded by itself, when the next one begins; from the first call on,
        only calls are."""
        for recorder in self.recorders:
            recorder.record(step)

    def without_history(self, places: Mapping[Slot, Place]) -> dict[Slot, int]:
        """The slots that have never seen a finite amax above zero, and how many runs they have seen. Waits for the
        device."""
        self.settle()
        found = {}
        for index, rows in _rows_by_table(places.values()).items():
            table = self.tables[index]
            scales, runs = table.scales[QUANT].tolist(), table.counts[RUNS].tolist()
            found.update({table.slots[row]: runs[row] for row in rows if scales[row] == 0})
        return found

    def begin_looking(self, places: Mapping[Slot, Place]) -> None:
        """Have tensors scaled by their own amax, whatever is known of them, unless a graph that has finished looking
        reads them too: its code may not be able to look."""
        if self._looked[0] != self.epoch:
            self._looked = self.epoch, set()
        self._look({slot: place for slot, place in places.items() if slot not in self._looked[1]}, True)

    def finish_looking(self, places: Mapping[Slot, Place]) -> None:
        """All slots of a graph have a history, or are not waited for: from now on it reads the scales of the state."""
        looked = self._looked[1] if self._looked[0] == self.epoch else set()
        self._looked = self.epoch, looked | set(places)
        self._look(places, False)

    def _look(self, places: Mapping[Slot, Place], on: bool) -> None:
        for index, rows in _rows_by_table(places.values()).items():
            self.tables[index].look(rows, on)

    def runs(self, places: Iterable[Place]) -> int:
        """How many runs these slots have seen at most. Waits for the device."""
        self.settle()
        return max((int(self.tables[place.table].counts[RUNS, place.row]) for place in places), default=0)

    def start_at_one(self, places: Iterable[Place]) -> None:
        """Give slots a scale before they have a history."""
        for place in places:
            self.tables[place.table].scales.data[:, place.row] = 1.0

    def _fill(self, slot: Slot, tensor: TensorUse, table: Table, row: int) -> None:
        """Fill a new slot with what was loaded for it, calibrated or frozen before it was there."""
        if table.kind.direction == FROZEN:
            reach = self.frozen_reach(slot)
            assert reach is not None, slot
            table.freeze(row, reach, exactly=slot.role is Role.WEIGHT)
            return
        saved = self._saved.take(slot, tensor.old_name, table.kind.length)
        if saved is not None:
            table.set_row(row, saved)
        else:
            self._prime(slot, table, row)


def _rows_by_table(places: Iterable[Place]) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for place in places:
        rows.setdefault(place.table, []).append(place.row)
    return rows
