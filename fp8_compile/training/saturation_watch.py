"""The part of training that says when a scale did not fit: a tensor was saturated, or too small for its scale.

The update of the scales counts that anyway, for every slot and step. Here the counts are read now and then, from a GPU
by a copy that no one waits for, and what is new is logged.

``skip``: a step in which a gradient lost more than half of its largest value is left out, as one with a gradient that
is not finite. The scales keep what they learned, so that the next step fits. That takes a look at the device in every
step, as dynamic loss scaling does.
"""

from __future__ import annotations

import logging
from typing import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8_compile.kernels.delayed_scaling import CLIPPED, COUNTERS, LOOK, QUANT, RUNS, SATURATED, SMALL
from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.slot import BACKWARD
from fp8_compile.scaling.find_state import states_within
from fp8_compile.scaling.stats import lost_numbers
from fp8_compile.scaling.table import Table

from .part import Step, TrainingPart

log = logging.getLogger("fp8_compile")

EVERY = 8  # steps between two looks; each of the first 8 steps has one
SHOWN = 5  # slots in a line of the log


class SaturationWatch(TrainingPart):
    """Logs a warning when a slot lost numbers, again when it has done so twice as often, and so on."""

    name = "saturation"

    def __init__(self, model: nn.Module, *, skip: bool = False, group: dist.ProcessGroup | None = None) -> None:
        """``group``: ranks that must agree on whether a step is skipped, where there are several."""
        self.model, self.skip, self.group = model, skip, group
        self._steps, self._clipped = 0, 0
        self._told: dict[str, int] = {}  # by slot: how many losses the last warning spoke of
        self._copies: list[_Copy] = []

    def inspect(self, step: Step) -> None:
        if not self.skip:
            return
        total = self._all_clipped()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size(self.group) > 1:
            dist.all_reduce(total, dist.ReduceOp.MAX, group=self.group)
        clipped = int(total)
        step.saturated, self._clipped = clipped > self._clipped, clipped

    def after_step(self, step: Step) -> None:
        if self.skip and step.not_finite:  # what it counted is forgotten
            self._clipped = int(self._all_clipped())
        if step.saturated:
            log.warning("a gradient lost more than half of its largest value: the step is skipped, its scale follows")
        self._steps += 1
        if self._steps <= EVERY or self._steps % EVERY == 0:
            self._look()

    def _look(self) -> None:
        """Read the copies that were begun at the last look, and begin new ones."""
        arrived = [copy for copy in self._copies if copy.is_there()]
        self._copies = [_Copy(prefix, table) for prefix, table in self._tables()]
        self._tell([*arrived, *(copy for copy in self._copies if not copy.on_gpu)])

    def _tell(self, copies: list[_Copy]) -> None:
        lost = {name: losses for copy in copies for name, losses in copy.losses()}
        new = {name: losses for name, losses in lost.items() if sum(losses[1:]) >= 2 * self._told.get(name, 0.5)}
        if not new:
            return
        self._told.update({name: sum(losses[1:]) for name, losses in new.items()})
        worst_first = sorted(new.items(), key=lambda item: -sum(item[1][1:]))
        shown = [lost_numbers(name, *losses) for name, losses in worst_first]
        more = f"; and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
        log.warning(
            "delayed scaling lost numbers: %s%s. A tensor changed by more than its scale leaves room for. Seldom, it "
            "does no harm; otherwise: a larger margin in the options of torch.compile, a smaller learning rate, "
            "attach(..., saturation='skip'), or recipe='tensorwise'",
            "; ".join(shown[:SHOWN]),
            more,
        )

    def _all_clipped(self) -> Tensor:
        """How often a gradient lost more than half of its largest value so far, what is not counted yet included."""
        gradients = [table for _, table in self._tables() if table.kind.direction == BACKWARD]
        device = gradients[0].kind.device if gradients else torch.device("cpu")
        each = [(table.counts[CLIPPED].sum() + _clips(table).sum()).to(device) for table in gradients]
        return sum(each, torch.zeros((), device=device))

    def _tables(self) -> Iterator[tuple[str, Table]]:
        for module, state in states_within(self.model).items():
            for table in state.tables:
                yield module, table


class _Copy:
    """What was counted for the slots of a table, on its way to the host."""

    def __init__(self, module: str, table: Table) -> None:
        self.module, self.slots, self.on_gpu = module, dict(table.slots), table.counts.is_cuda
        if not self.on_gpu:
            self._counts = table.counts[:COUNTERS].clone()
            return
        self._counts = torch.empty((COUNTERS, table.capacity), dtype=torch.int32, pin_memory=True)
        self._counts.copy_(table.counts[:COUNTERS], non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def is_there(self) -> bool:
        """True for a copy from a GPU that has arrived."""
        return self.on_gpu and self._event.query()

    def losses(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """(name, (steps, of them saturated, too small)) of each slot that lost something."""
        counts = self._counts.tolist()
        for row, slot in self.slots.items():
            # A large step moves the largest weights by some percent of their size, which is not worth a warning.
            saturated = counts[CLIPPED if slot.role is Role.WEIGHT else SATURATED][row]
            if saturated or counts[SMALL][row]:
                name = f"{self.module}.{slot}" if self.module else str(slot)
                yield name, (counts[RUNS][row], saturated, counts[SMALL][row])


def _clips(table: Table) -> Tensor:
    """For each slot, True if what the last run recorded lost more than half of its largest value."""
    reached = table.amaxes * table.scales[QUANT]
    return (table.amaxes < torch.inf) & (reached > 2 * table.kind.largest) & (table.counts[LOOK] == 0)
