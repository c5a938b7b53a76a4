"""A page of the scaling state: a few tensors for many slots, so that a graph reads and updates all of them at once."""

from __future__ import annotations

import dataclasses
from typing import Mapping

import torch
from torch import Tensor

from fp8_compile.kernels.delayed_scaling import ABSENT, DEQUANT, QUANT, update_in_place_op
from fp8_compile.passes.delay_scales import UpdateRule
from fp8_compile.passes.slot import FIELDS, Slot


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

    def __init__(self, kind: PageKind, capacity: int, unit: float = 1.0) -> None:
        """``unit``: by how much the graphs multiply the tensors of these slots, the loss scale of gradients."""
        self.kind, self.slots, self.unit = kind, list[Slot](), unit
        with torch.device(kind.device):  # dtypes said, since a default dtype may be set
            self.amaxes = torch.full((capacity,), ABSENT, dtype=torch.float32)
            self.history = torch.zeros(capacity, kind.length, dtype=torch.float32)
            self.scales = torch.zeros(2, capacity, dtype=torch.float32)
            self.counts = torch.zeros(2, capacity, dtype=torch.int32)
            self.stats = torch.zeros(capacity, 5, dtype=torch.float64)
        self._kept: list[Tensor] | None = None  # FIELDS for restore(); None: as if no pass had been

    def clear(self) -> None:
        self._kept = None
        self.amaxes.data.fill_(ABSENT)
        for tensor in (self.history, self.scales, self.counts, self.stats):
            tensor.data.zero_()

    def keep(self) -> None:
        """Remember everything as it is now."""
        torch._foreach_copy_(self._copies(), self._tensors())

    def restore(self) -> None:
        """As it was when it was kept; what was loaded or calibrated since then stays."""
        if self._kept is None:
            self.clear()
        else:
            torch._foreach_copy_(self._tensors(), self._kept)

    def _tensors(self) -> list[Tensor]:
        return [getattr(self, field).data for field in FIELDS]

    def _copies(self) -> list[Tensor]:
        if self._kept is None:
            amaxes, *others = self._tensors()
            self._kept = [torch.full_like(amaxes, ABSENT), *map(torch.zeros_like, others)]
        return self._kept

    def settle(self) -> None:
        """Do the update that the next pass would begin with: what was recorded becomes history."""
        kind = self.kind
        known = torch.empty_like(self.scales)
        rule = (kind.largest, kind.rule.margin, kind.rule.algorithm, kind.rule.interval)
        update_in_place_op(self.amaxes, self.history, self.scales, self.counts, known, *rule)

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
            "counts": self.counts[:, row].clone(),
            "largest": torch.tensor(self.kind.largest, dtype=torch.float32),
        }

    def set_row(self, row: int, saved: Mapping[str, Tensor]) -> None:
        scale = saved["scale"] * (self.kind.largest / float(saved["largest"])) / self.unit  # saved for another format
        # .data, in _tensors: a forward may have saved the state for its backward, and autograd compares versions.
        for amaxes, history, scales, counts in (self._tensors(), self._copies()):
            scales[QUANT, row] = scale
            scales[DEQUANT, row] = torch.where(scale > 0, 1.0 / scale, 0.0)
            amaxes[row] = ABSENT
            history[row] = saved["amax_history"] * self.unit
            counts[:, row] = saved["counts"]

    def prime(self, row: int, amax: float) -> None:
        """As if a pass had seen that amax."""
        for amaxes in (self._tensors()[0], self._copies()[0]):
            amaxes[row] = max(float(amaxes[row]), amax)
