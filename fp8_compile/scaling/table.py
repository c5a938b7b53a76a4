"""A table of the scaling state: a few tensors for many slots, so that a graph reads and updates all of them at once."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Iterator, Mapping

import torch
from torch import Tensor

from fp8_compile.kernels.delayed_scaling import (
    ABSENT,
    COUNTERS,
    DEQUANT,
    LOOK,
    MARGIN,
    QUANT,
    STATS_FIELDS,
    STEADY,
    room_for,
    update,
    update_in_place_op,
)
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.slot import FROZEN, Slot
from fp8_compile.passes.graph.update_rule import UpdateRule
from fp8_compile.torch_internals.autograd import copy_all


@dataclasses.dataclass(frozen=True)
class TableKind:
    """What the slots of a table have in common."""

    direction: str
    device: torch.device
    length: int  # of the histories
    largest: float  # value of the FP8 format
    rule: UpdateRule


class Table:
    """The tensors of up to ``capacity`` slots; see ``kernels/delayed_scaling.py`` for their meaning."""

    def __init__(self, kind: TableKind, capacity: int, unit: float = 1.0, room: Tensor | None = None) -> None:
        """``unit``: by how much the graphs multiply the tensors of these slots, the loss scale of gradients. ``room``:
        what slots of other tables need after a jump; theirs is added to it."""
        self.kind, self.slots, self.unit = kind, dict[int, Slot](), unit  # slots by row
        with torch.device(kind.device):  # dtypes said, since a default dtype may be set
            self.amaxes = torch.full((capacity,), ABSENT, dtype=torch.float32)
            self.history = torch.zeros(capacity, kind.length, dtype=torch.float32)
            self.scales = torch.zeros(2, capacity, dtype=torch.float32)
            self.counts = torch.zeros(STEADY + 1, capacity, dtype=torch.int32)
            self.stats = torch.zeros(capacity, STATS_FIELDS, dtype=torch.float64)
        self.room = torch.zeros(1, dtype=torch.int32, device=kind.device) if room is None else room
        self._kept: list[Tensor] | None = None  # for restore(); None: as if no run had been
        self._kept_look = torch.zeros_like(self.counts[LOOK])  # amaxes that wait are counted as they were recorded

    def put(self, row: int, slot: Slot) -> None:
        """A row is a slot's from now on."""
        self.slots[row] = slot
        self.counts.data[MARGIN, row] = self.kind.rule.margin_of(slot.role, self.kind.largest)
        self.counts.data[STEADY, row] = slot.role is Role.WEIGHT

    def clear(self) -> None:
        """As new, but for the settings of the slots."""
        self._kept = None
        with self._room_follows():
            self.amaxes.data.fill_(ABSENT)
            for tensor in (self.history, self.scales, self.counts[:COUNTERS], self.stats):
                tensor.data.zero_()

    def look(self, rows: list[int], on: bool) -> None:
        """Have the tensors of some slots scaled by their own amax, whatever is known of them; or no longer."""
        self.counts.data[LOOK, rows] = int(on)

    def freeze(self, row: int, reach: float, *, exactly: bool = False) -> None:
        """Fix a slot's scale: it reaches to that magnitude. Unless ``exactly``, to a number that is the reciprocal of
        its reciprocal: packed layers and checkpoints store the reciprocal alone."""
        scale = torch.tensor(self.kind.largest / reach).clamp_max(torch.finfo(torch.float32).max)
        dequant = scale.reciprocal()
        self.scales.data[QUANT, row] = scale if exactly else dequant.reciprocal()
        self.scales.data[DEQUANT, row] = dequant

    def keep(self) -> None:
        """Remember everything as it is now."""
        copy_all([*self._copies(), self._kept_look], [*self._tensors(), self.counts.data[LOOK]])

    def restore(self) -> None:
        """As it was when it was kept; what was loaded or calibrated since then stays."""
        if self._kept is None:
            self.clear()
        else:
            with self._room_follows():
                copy_all([*self._tensors(), self.counts.data[LOOK]], [*self._kept, self._kept_look])

    @contextlib.contextmanager
    def _room_follows(self) -> Iterator[None]:
        """Counts are replaced: what their slots need is taken off the common room, and added as it is then."""
        before = room_for(self.counts)
        yield
        self.room.data += room_for(self.counts) - before

    def _tensors(self) -> list[Tensor]:
        """What runs of graphs change."""
        return [self.amaxes.data, self.history.data, self.scales.data, self.counts.data[:COUNTERS]]

    def _copies(self) -> list[Tensor]:
        if self._kept is None:
            amaxes, *others = self._tensors()
            self._kept = [torch.full_like(amaxes, ABSENT), *map(torch.zeros_like, others)]
        return self._kept

    def settle(self) -> None:
        """Do the update that the next run would begin with: what was recorded becomes history."""
        known = torch.empty_like(self.scales)
        rule = ("frozen", 1) if self.kind.direction == FROZEN else self.kind.rule.arguments
        state = (self.amaxes, self.history, self.scales, self.counts, self.room)
        update_in_place_op(*state, known, self.kind.largest, *rule)

    @property
    def capacity(self) -> int:
        return self.amaxes.shape[0]

    def set_unit(self, unit: float) -> None:
        """Go on with tensors that are ``unit`` times as large as those of the model."""
        factor, self.unit = unit / self.unit, unit
        self.amaxes.data.copy_(torch.where(self.amaxes == ABSENT, ABSENT, self.amaxes * factor))
        self.history.data.mul_(factor)
        self.scales.data[QUANT].div_(factor)
        self.scales.data[DEQUANT].mul_(factor)

    def row(self, row: int) -> dict[str, Tensor]:
        """A slot's part of the state, as it is saved: without the unit."""
        return {
            "scale": self.scales[QUANT, row] * self.unit,
            "amax_history": self.history[row] / self.unit,
            "counts": self.counts[:COUNTERS, row].clone(),
            "largest": torch.tensor(self.kind.largest, dtype=torch.float32),
        }

    def set_row(self, row: int, saved: Mapping[str, Tensor]) -> None:
        scale = saved["scale"] * (self.kind.largest / float(saved["largest"])) / self.unit  # saved for another format
        with self._room_follows():
            # .data, in _tensors: a forward may have saved the state for its backward, and autograd compares versions.
            for amaxes, history, scales, counts in (self._tensors(), self._copies()):
                scales[QUANT, row] = scale
                scales[DEQUANT, row] = torch.where(scale > 0, 1.0 / scale, 0.0)
                amaxes[row] = ABSENT
                history[row] = saved["amax_history"] * self.unit
                counts[:, row] = 0  # what was saved before version 0.2 has two counters
                counts[: len(saved["counts"]), row] = saved["counts"]

    def forget(self, row: int) -> None:
        """As before the first run of a slot, but for its settings."""
        nothing = {"scale": torch.zeros(()), "amax_history": torch.zeros(self.kind.length), "counts": torch.zeros(0)}
        self.set_row(row, {**nothing, "largest": torch.tensor(self.kind.largest)})

    def prime(self, row: int, amax: float) -> None:
        """As if a run had seen that amax, with the tensor's own scale: nothing was saturated by it."""
        for _, *state in (self._tensors(), self._copies()):
            settings = self.counts.data[COUNTERS:, row : row + 1].clone()
            settings[LOOK - COUNTERS] = 1
            history, scales, counts = (state[0][row : row + 1], *(tensor[:, row : row + 1] for tensor in state[1:]))
            seen = torch.full((1,), amax, dtype=torch.float32, device=history.device)
            whole = torch.cat([counts, settings])
            new = update(history, scales, whole, seen, self.kind.largest, *self.kind.rule.arguments)
            for old, one in zip((history, scales, counts), (*new[:2], new[2][:COUNTERS])):
                old.copy_(one)
