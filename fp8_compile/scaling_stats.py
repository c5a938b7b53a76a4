"""What became of the tensors of each slot: how much was saturated, how much was lost, and how well the rest fits."""

from __future__ import annotations

import dataclasses
import math
from typing import Sequence

from torch import Tensor

from .report import align


@dataclasses.dataclass(frozen=True)
class StatsRow:
    """One slot since the start or the last ``reset_stats()``; without ``stats=True`` only amax and scale are known."""

    slot: str
    elements: int  # that were quantized
    overflow: int  # finite, but beyond the largest FP8 value: saturated
    underflow: int  # not zero, but rounded to zero
    amax: float  # the newest in the history
    scale: float  # quant_scale of the next pass; 0: none yet
    sqnr: float  # dB, sum of x**2 over sum of (x - dequantized)**2; nan: nothing counted


class StatsTable(Sequence[StatsRow]):
    """Rows that print as a table."""

    def __init__(self, rows: Sequence[StatsRow]) -> None:
        self._rows = list(rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        header = ("slot", "elements", "overflow", "underflow", "amax", "scale", "SQNR dB")
        cells = [
            (
                row.slot,
                str(row.elements),
                _share(row.overflow, row.elements),
                _share(row.underflow, row.elements),
                f"{row.amax:.3g}",
                f"{row.scale:.3g}",
                f"{row.sqnr:.1f}",
            )
            for row in self._rows
        ]
        table = align([header, *cells])
        table.insert(1, "-" * max(len(line) for line in table))
        return "\n".join(table)

    __repr__ = __str__


def stats_row(slot: str, history: Tensor, entered: Tensor, scale: Tensor, counted: Tensor) -> StatsRow:
    """A row from the state's tensors; ``counted`` as ``kernels/delayed_scaling.py: count`` gives it."""
    elements, overflow, underflow, signal, noise = counted.tolist()
    amax = float(history[(int(entered) - 1) % len(history)]) if int(entered) else 0.0
    return StatsRow(slot, int(elements), int(overflow), int(underflow), amax, float(scale), decibel(signal, noise))


def decibel(signal: float, noise: float) -> float:
    """Signal to noise; nan where nothing was counted, inf where nothing was lost."""
    if signal == 0:
        return math.nan
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def _share(count: int, whole: int) -> str:
    return f"{count} ({count / whole:.2%})" if count else "0"
