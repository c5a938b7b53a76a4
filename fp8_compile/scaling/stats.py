"""What became of the tensors of each slot: how much was saturated, how much was lost, and how well the rest fits."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Sequence, overload

from fp8_compile.kernels.delayed_scaling import ENTERED, QUANT, RUNS, SATURATED, SMALL
from fp8_compile.report import align

if TYPE_CHECKING:
    from .table import Table

WHY_EMPTY = (
    "no graph with an FP8 matmul was compiled for this model under recipe='delayed' with gradients. Expected "
    "torch.compile(model, backend='fp8') and one training step before; fp8_compile.explain(model, args) tells "
    "what becomes of each matmul, TORCH_LOGS=graph_breaks what Dynamo left out"
)


@dataclasses.dataclass(frozen=True)
class StatsRow:
    """One slot since the start or the last ``reset_stats()``; without ``stats=True`` only amax and scale are known."""

    slot: str
    elements: int  # that were quantized
    overflow: int  # finite, but beyond the largest FP8 value: saturated
    underflow: int  # not zero, but rounded to zero
    amax: float  # the newest in the history
    scale: float  # quant_scale of the next run; 0: none yet
    sqnr: float  # dB, sum of x**2 over sum of (x - dequantized)**2; nan: nothing counted
    steps: int = 0  # in which the tensor was quantized
    saturated: int = 0  # of them, those in which its largest value was beyond what its scale holds
    small: int = 0  # those in which it was so small that its scale flushes much of it to zero
    blocks: int = 0  # that were quantized and not all zero: MXFP8 and NVFP4
    at_ends: int = 0  # of them, those whose scale is the smallest or the largest that there is


class StatsTable(Sequence[StatsRow]):
    """Rows that print as a table."""

    def __init__(self, rows: Sequence[StatsRow]) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, index: int) -> StatsRow: ...

    @overload
    def __getitem__(self, index: slice) -> list[StatsRow]: ...

    def __getitem__(self, index: int | slice) -> StatsRow | list[StatsRow]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __str__(self) -> str:
        counted = ("steps", "saturated", "small", "elements", "overflow", "underflow")
        header: tuple[str, ...] = ("slot", *counted, "amax", "scale", "SQNR dB")
        cells: list[tuple[str, ...]] = [
            (
                row.slot,
                *map(str, (row.steps, row.saturated, row.small)),
                str(row.elements),
                _share(row.overflow, row.elements),
                _share(row.underflow, row.elements),
                f"{row.amax:.3g}",
                f"{row.scale:.3g}",
                f"{row.sqnr:.1f}",
            )
            for row in self._rows
        ]
        if any(row.blocks for row in self._rows):
            header = (*header, "blocks at ends")
            cells = [(*cell, _share(row.at_ends, row.blocks)) for cell, row in zip(cells, self._rows)]
        table = align([header, *cells])
        table.insert(1, "-" * max(len(line) for line in table))
        return "\n".join(table)

    __repr__ = __str__


def stats_row(slot: str, table: Table, row: int) -> StatsRow:
    """A row from the state's tensors."""
    counted = table.stats[row].tolist()  # kernels/delayed_scaling.py: count; kernels/block_counts.py
    elements, overflow, underflow, signal, noise, blocks, at_ends = counted
    counts, history = table.counts[:, row].tolist(), table.history[row]
    amax = float(history[(counts[ENTERED] - 1) % len(history)] / table.unit) if counts[ENTERED] else 0.0
    scale = float(table.scales[QUANT, row] * table.unit)
    seen = (counts[RUNS], counts[SATURATED], counts[SMALL])
    return StatsRow(
        slot,
        int(elements),
        int(overflow),
        int(underflow),
        amax,
        scale,
        decibel(signal, noise),
        *seen,
        int(blocks),
        int(at_ends),
    )


def in_words(rows: StatsTable) -> str:
    """Say how many tensors there are, and which of them lost numbers."""
    if not rows:
        return f"ScalingState of no tensors: {WHY_EMPTY}"
    lost = [row for row in rows if row.saturated or row.small]
    steps = max(row.steps for row in rows)
    head = f"ScalingState of {len(rows)} tensors, {steps} steps; "
    if not lost:
        return head + "none was ever saturated or too small for its scale"
    lines = [f"  {lost_numbers(row.slot, row.steps, row.saturated, row.small)}" for row in lost]
    return "\n".join([head + f"{len(lost)} lost numbers:", *lines])


def lost_numbers(slot: str, steps: int, saturated: int, small: int) -> str:
    """What a slot lost, in words."""
    kinds = {"saturated": saturated, "too small for its scale": small}
    parts = [f"{kind} in {count} of {steps} steps" for kind, count in kinds.items() if count]
    return f"{slot} was {' and '.join(parts)}"


def decibel(signal: float, noise: float) -> float:
    """Signal to noise; nan where nothing was counted, inf where nothing was lost."""
    if signal == 0:
        return math.nan
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def _share(count: int, whole: int) -> str:
    return f"{count} ({count / whole:.2%})" if count else "0"
