"""Amaxes, scales and counts of a graph's tensors over time: ``passes.jsonl`` in its dump folder, for the first module
that runs the graph; ``passes.1.jsonl`` for the second, and so on.

The first line names the tensors, each further one is a moment (null: not part of it; "inf", "nan": not finite):

    {"slots": ["up#0.input", ...], "largest": [448.0, ...]}
    {"pass": 3, "step": null, "amax": [1.25, ...], "scale": [358.4, ...], "elements": [4096, ...],
     "overflow": [0, ...], "underflow": [7, ...], "sqnr": [31.5, ...], "blocks": [128, ...], "at_ends": [0, ...]}

``amax`` is of the newest run of the graph and ``scale`` the one that it used (0: none yet, or none at all, its own amax
was taken; where someone called ``stats()`` or ``state_dict()`` in between, the next one). The counts are those since
the line before; ``blocks`` and ``at_ends`` are of formats with a scale per block, and 0 elsewhere (``stats.py``). In
long trainings only every second run is recorded, then every fourth and so on, and no count is lost by that. Only
tensors are read, nothing of the state changes; a GPU is waited for. The name of the file and its key "pass" come from a
time when a run was called a pass: they stay, so that old files can be read.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from fp8_compile.kernels.delayed_scaling import ABSENT, ENTERED, QUANT, RUNS, STATS_FIELDS

from .stats import decibel

if TYPE_CHECKING:
    from .graph_slots import BoundSlots

logger = logging.getLogger("fp8_compile")

LINES_BEFORE_THINNING = 512  # then the same number of lines for every second run, and so on
FILE = "passes.jsonl"


class RunRecorder:
    """Records one graph's slots. :meth:`begin_run` is called before each run, :meth:`record` by a user
    who knows better when a step ends."""

    def __init__(self, path: Path, slots: BoundSlots, show: Callable[[Path], object]) -> None:
        """``show`` makes the page of the folder again, with what was recorded since."""
        self.path, self.folder, self.state, self._show = path, path.parent, slots.state, show
        self.places = {str(slot): place for slot, place in slots.places.items()}
        self._rows = set(slots.places.values())
        self._counted = {slot: [0.0] * STATS_FIELDS for slot in self.places}
        self._runs_of = {slot: 0 for slot in self.places}
        self._lines, self._runs, self._every = 0, 0, 1
        self._pending, self._by_hand, self._stopped = False, False, False
        self.state.recorders.append(self)
        _all.add(self)
        largest = [self.state.tables[place.table].kind.largest for place in self.places.values()]
        self._append({"slots": list(self.places), "largest": largest})

    def begin_run(self) -> None:
        """What the run before left is complete: its backward has run, and nothing has taken it over yet."""
        for other in self.state.recorders:  # graphs for other sizes of one module have slots in common
            if other is self or other._rows & self._rows:
                other.end_run()
        self._runs += 1
        self._pending = True

    def end_run(self) -> None:
        if self._pending and not self._by_hand and self._runs % self._every == 0:
            self._write(None)
        self._pending = False

    def record(self, step: int | None) -> None:
        """Write a line now, and from now on only when asked to."""
        if self._pending or not self._by_hand:
            self._write(step)
        self._by_hand, self._pending = True, False

    def finish(self) -> None:
        """The last run has no run after it."""
        self.end_run()
        if self._lines > 1:
            self._write_page()

    def _write(self, step: int | None) -> None:
        moment = self._moment()
        if all(amax is None for amax in moment["amax"]):
            return
        self._append({"pass": self._runs, "step": step, **moment})
        recorded = self._lines - 1
        if recorded % LINES_BEFORE_THINNING == 0 and not self._by_hand:
            self._every *= 2
        if recorded & (recorded - 1) == 0:  # at 1, 2, 4, 8...: a page to look at while training goes on
            self._write_page()

    def _moment(self) -> dict[str, list[Any]]:
        tables = {place.table: self._read(place.table) for place in self.places.values()}
        names = ("amax", "scale", "elements", "overflow", "underflow", "sqnr", "blocks", "at_ends")
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for slot, place in self.places.items():
            amaxes, scales, runs, newest, stats = (column[place.row] for column in tables[place.table])
            if amaxes == ABSENT and runs > self._runs_of[slot]:
                amaxes = newest  # someone has looked at the state since, which takes the amaxes over
            self._runs_of[slot] = runs
            counted = [now - then for now, then in zip(stats, self._counted[slot])]
            if counted[0] < 0:  # reset_stats() was called
                counted = stats
            self._counted[slot] = stats
            elements, overflow, underflow, signal, noise, blocks, at_ends = counted
            columns["amax"].append(None if amaxes == ABSENT else _plain(amaxes))
            columns["scale"].append(_plain(scales))
            columns["elements"].append(int(elements))
            columns["overflow"].append(int(overflow))
            columns["underflow"].append(int(underflow))
            columns["sqnr"].append(_plain(decibel(signal, noise)) if elements else None)
            columns["blocks"].append(int(blocks))
            columns["at_ends"].append(int(at_ends))
        return columns

    def _read(self, index: int) -> tuple[list[Any], ...]:
        table = self.state.tables[index]
        newest = (table.counts[ENTERED].long() - 1).clamp_min(0) % table.history.shape[1]
        return (
            table.amaxes.tolist(),
            table.scales[QUANT].tolist(),
            table.counts[RUNS].tolist(),
            table.history.gather(1, newest[:, None])[:, 0].tolist(),
            table.stats.tolist(),
        )

    def _append(self, line: dict[str, Any]) -> None:
        if self._stopped:
            return
        try:
            with self.path.open("a", encoding="ascii") as file:
                file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
            self._lines += 1
        except OSError as error:
            self._stop(error)

    def _write_page(self) -> None:
        if self._stopped:
            return
        try:
            self._show(self.folder)
        except (OSError, ValueError) as error:  # ValueError: someone has edited the files
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        self._stopped = True
        logger.warning("cannot record passes in %s: %s. Nothing more is recorded; training goes on", self.folder, error)


_all: weakref.WeakSet[RunRecorder] = weakref.WeakSet()


@atexit.register
def _finish_all() -> None:
    for recorder in list(_all):
        with contextlib.suppress(RuntimeError):  # a device that is shut down already has nothing to tell
            recorder.finish()


def _plain(number: float) -> float | str:
    """Six digits are enough for a chart; JSON has no Inf and NaN."""
    return float(f"{number:.6g}") if math.isfinite(number) else str(number)
