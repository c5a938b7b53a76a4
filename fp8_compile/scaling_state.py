"""What delayed scaling remembers of a model: one pool of amax histories and scales, shared by all its graphs.

A slot is one quantized tensor, named ``blocks.0.mlp.up#0.input``: the module, which of its matmuls, the operand's role.
Slots lie in pages: a few tensors for many slots, so that a graph reads and updates all of them at once. A graph is
compiled with places in pages fixed; a graph that needs more slots than the pages have left gets a page more.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import innermost_fn

from fp8_compile.kernels.delayed_scaling import ABSENT, DEQUANT, ENTERED, QUANT, update_in_place_op
from fp8_compile.passes.delay_scales import UpdateRule
from fp8_compile.passes.find_matmuls import Role
from fp8_compile.passes.slot import Place, Slot, buffer_name

from .module_names import compiled_root, frame_code, single_module
from .scaling_stats import StatsRow, StatsTable, stats_row

SAVED = ("scale", "amax_history", "counts", "largest")


@dataclasses.dataclass(frozen=True)
class PageKind:
    """What the slots of a page have in common."""

    direction: str
    device: torch.device
    length: int  # of the histories
    largest: float  # value of the FP8 format
    rule: UpdateRule


class Page:
    """The tensors of up to ``capacity`` slots; see ``kernels/delayed_scaling.py`` for their meaning."""

    def __init__(self, kind: PageKind, capacity: int) -> None:
        self.kind, self.slots = kind, list[Slot]()
        with torch.device(kind.device):
            self.amaxes = torch.full((capacity,), ABSENT)
            self.history = torch.zeros(capacity, kind.length)
            self.scales = torch.zeros(2, capacity)
            self.counts = torch.zeros(2, capacity, dtype=torch.int32)
            self.stats = torch.zeros(capacity, 5, dtype=torch.float64)

    def clear(self) -> None:
        self.amaxes.fill_(ABSENT)
        for tensor in (self.history, self.scales, self.counts, self.stats):
            tensor.zero_()

    def settle(self) -> None:
        """Do the update that the next pass would begin with: what was recorded becomes history."""
        kind = self.kind
        known = torch.empty_like(self.scales)
        rule = (kind.largest, kind.rule.margin, kind.rule.algorithm, kind.rule.interval)
        update_in_place_op(self.amaxes, self.history, self.scales, self.counts, known, *rule)

    @property
    def capacity(self) -> int:
        return self.amaxes.shape[0]

    def row(self, row: int) -> dict[str, Tensor]:
        """A slot's part of the state, as it is saved."""
        return {
            "scale": self.scales[QUANT, row].clone(),
            "amax_history": self.history[row].clone(),
            "counts": self.counts[:, row].clone(),
            "largest": torch.tensor(self.kind.largest),
        }

    def set_row(self, row: int, saved: Mapping[str, Tensor]) -> None:
        scale = saved["scale"] * (self.kind.largest / float(saved["largest"]))  # saved for another format
        self.scales[QUANT, row] = scale
        self.scales[DEQUANT, row] = torch.where(scale > 0, 1.0 / scale, 0.0)
        self.amaxes[row] = ABSENT
        self.history[row] = saved["amax_history"]
        self.counts[:, row] = saved["counts"]


class PoolFull(Exception):
    """A graph has more quantized tensors than was foreseen: ``needed`` rows would do."""

    def __init__(self, direction: str, needed: int) -> None:
        super().__init__(direction, needed)
        self.direction, self.needed = direction, needed


class ScalingState:
    """The state of one model. :func:`scaling_state` finds it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self.pages: list[Page] = []
        self._waiting: dict[str, dict[str, Tensor]] = {}  # loaded, for slots that no graph has asked for yet
        self.epoch = 0  # goes up when histories are replaced: whoever believed that they were there looks again

    def settle(self) -> None:
        """Bring histories and scales up to date with the last pass."""
        for page in self.pages:
            page.settle()

    def slots(self) -> Iterator[tuple[Slot, Place]]:
        """Every slot and where it lies."""
        for index, page in enumerate(self.pages):
            for row, slot in enumerate(page.slots):
                yield slot, Place(index, row)

    def state_dict(self) -> dict[str, Tensor]:
        """Plain tensors: ``<slot>.scale``, ``.amax_history``, ``.counts`` and ``.largest``, copies of the state."""
        self.settle()
        rows = {str(slot): self.pages[place.page].row(place.row) for slot, place in self.slots()}
        return {f"{slot}.{field}": tensor for slot, row in (self._waiting | rows).items() for field, tensor in row.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take a saved state over, before or after the model is compiled. One that does not fit changes nothing."""
        rows = _by_slot(state_dict)
        places = {str(slot): place for slot, place in self.slots()}
        self._check(rows, places)
        for slot, row in rows.items():
            if slot in places:
                self.pages[places[slot].page].set_row(places[slot].row, row)
        self._waiting = {slot: row for slot, row in rows.items() if slot not in places}
        self.epoch += 1

    def reset(self) -> None:
        """Forget all histories, as when weights or data are replaced by very different ones: the next pass takes each
        tensor's scale from the tensor itself, as the first one did."""
        for page in self.pages:
            page.clear()
        self._waiting.clear()
        self.epoch += 1

    def stats(self) -> StatsTable:
        """One row a slot: what was saturated, what was flushed to zero, amax, scale, signal to quantization noise."""
        self.settle()
        return StatsTable(self._stats_rows())

    def _stats_rows(self) -> list[StatsRow]:
        return [
            stats_row(str(slot), page.history[place.row], page.counts[ENTERED, place.row], page.scales[QUANT, place.row], page.stats[place.row])
            for slot, place in self.slots()
            for page in (self.pages[place.page],)
        ]

    def reset_stats(self) -> None:
        """Count from zero; scales and histories stay."""
        for page in self.pages:
            page.stats.zero_()

    def without_history(self, places: Iterable[Place]) -> bool:
        """Whether some of the slots have never seen a finite amax above zero. Waits for the device."""
        self.settle()
        rows: dict[int, list[int]] = {}
        for place in places:
            rows.setdefault(place.page, []).append(place.row)
        return any(bool((self.pages[page].scales[QUANT, some] == 0).any()) for page, some in rows.items())

    def start_at_one(self, places: Iterable[Place]) -> None:
        """Give slots a scale before they have a history."""
        for place in places:
            self.pages[place.page].scales[:, place.row] = 1.0

    def _take_waiting(self, slot: Slot, page: Page, row: int) -> None:
        if (saved := self._waiting.get(str(slot))) is not None:
            _check_length(str(slot), saved, page.kind.length)
            page.set_row(row, self._waiting.pop(str(slot)))

    def _check(self, rows: Mapping[str, Mapping[str, Tensor]], places: Mapping[str, Place]) -> None:
        missing = sorted(set(places) - set(rows))
        unknown = sorted(slot for slot in set(rows) - set(places) if not self._may_have(slot))
        if missing or unknown:
            parts = [f"{what}: {', '.join(slots)}" for what, slots in (("missing", missing), ("unknown", unknown)) if slots]
            raise ValueError(
                f"the scaling state does not fit the model; slots {'; '.join(parts)}. "
                "Expected a state_dict() of a model with the same modules and options"
            )
        for slot, place in places.items():
            _check_length(slot, rows[slot], self.pages[place.page].kind.length)

    def _may_have(self, slot: str) -> bool:
        """Whether a slot that no graph has asked for yet can be one of this model."""
        model = self._model() if self._model is not None else None
        return model is None or slot.rpartition("#")[0] in {name for name, _ in model.named_modules()}


class GraphPool:
    """The slots of one graph: places in pages of the model's state. ``buffers`` are the tensors that it is given."""

    def __init__(self, state: ScalingState, kinds: Iterable[PageKind], room: int) -> None:
        self.state, self.places = state, dict[Slot, Place]()
        self._pages: dict[str, list[int]] = {}
        for kind in kinds:
            self._pages[kind.direction] = [index for index, page in enumerate(state.pages) if page.kind == kind]
            self.make_room(kind, room)
        self.fingerprint = repr([(d, [(i, state.pages[i].capacity, state.pages[i].slots) for i in p]) for d, p in self._pages.items()])

    def make_room(self, kind: PageKind, room: int) -> None:
        """A page more unless the last one has that many rows left."""
        pages = self._pages[kind.direction]
        last = self.state.pages[pages[-1]] if pages else None
        if last is None or last.capacity - len(last.slots) < room:
            self.state.pages.append(Page(kind, room))
            pages.append(len(self.state.pages) - 1)

    def buffers(self, fields: Iterable[str]) -> dict[str, Tensor]:
        """Name in the graph -> tensor."""
        return {
            buffer_name(direction, index, field): getattr(self.state.pages[index], field)
            for direction, pages in self._pages.items()
            for index in pages
            for field in fields
        }

    def place(self, slot: Slot) -> Place:
        pages = self._pages[slot.direction]
        for index in pages:
            page = self.state.pages[index]
            if slot in page.slots:
                return self._placed(slot, Place(index, page.slots.index(slot)))
        page = self.state.pages[pages[-1]]
        if len(page.slots) == page.capacity:
            raise PoolFull(slot.direction, 2 * page.capacity)
        page.slots.append(slot)
        row = len(page.slots) - 1
        self.state._take_waiting(slot, page, row)
        return self._placed(slot, Place(pages[-1], row))

    def _placed(self, slot: Slot, place: Place) -> Place:
        self.places[slot] = place
        return place

    def to_list(self) -> list[Any]:
        """Plain data for the report cache: what a graph from Inductor's cache has built in."""
        return [[slot.module, slot.ordinal, str(slot.role), slot.part, dataclasses.astuple(place)] for slot, place in self.places.items()]

    def adopt(self, stored: Iterable[Any]) -> None:
        """Take the places that code from Inductor's cache was compiled with."""
        for module, ordinal, role, part, place in stored:
            given = self.place(Slot(module, ordinal, Role(role), part))
            assert dataclasses.astuple(given) == tuple(place), "the cache's key covers the places of all slots"


_states: weakref.WeakKeyDictionary[Any, ScalingState] = weakref.WeakKeyDictionary()
_module_of_code: weakref.WeakKeyDictionary[Any, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def scaling_state(model: nn.Module | Callable[..., Any]) -> ScalingState:
    """The state of a model, plain or compiled; of a compiled function, that of the module it runs."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, nn.Module):
        return _states.setdefault(model, ScalingState(model))
    if not callable(model):
        raise TypeError(f"scaling_state expects a module or a compiled function, got {type(model).__name__}")
    code = innermost_fn(model).__code__
    module = _module_of_code[code]() if code in _module_of_code else None
    return scaling_state(module) if module is not None else _states.setdefault(code, ScalingState())


def state_of_compilation() -> ScalingState:
    """The state of what Dynamo is compiling: of the compiled module, or of the one that a compiled function runs."""
    root, code = compiled_root(), frame_code()
    module = root or single_module()
    if module is None:
        return _states.setdefault(code, ScalingState()) if code is not None else ScalingState()
    if root is None and code is not None:
        _module_of_code[code] = weakref.ref(module)
    return scaling_state(module)


def _by_slot(state_dict: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    rows: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state_dict.items():
        slot, _, field = key.rpartition(".")
        rows.setdefault(slot, {})[field] = tensor
    bad = sorted(slot for slot, row in rows.items() if set(row) != set(SAVED))
    if bad:
        raise ValueError(f"slots {', '.join(bad)} are not whole; expected {', '.join(SAVED)} of each, as state_dict() gives")
    return rows


def _check_length(slot: str, row: Mapping[str, Tensor], length: int) -> None:
    if (got := row["amax_history"].numel()) != length:
        raise ValueError(f"slot {slot} was saved with a history of {got}; expected amax_history_len={length}: set it to {got}")
