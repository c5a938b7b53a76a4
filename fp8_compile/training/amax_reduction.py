"""The part of training that gives every rank the same scales: one all-reduce of all amaxes per step.

    amaxes[slot] = max over ranks and over the micro-batches of the step
    found_inf    = max over ranks, in the same message

While it is attached, graphs record amaxes and leave histories and scales alone. ``optimizer.step()``, which all ranks
call alike, puts the amaxes together and does the update: scales are equal on all ranks, bit for bit, in every run.
Slots go by their names, so ranks may have compiled their graphs in any order; but they must be the same slots.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8_compile.scaling.find_state import states_within
from fp8_compile.scaling.model_state import request
from fp8_compile.scaling.state import ScalingState

from .part import Step, TrainingPart

ROUND_SIZE = 1024  # ranks that disagree about their slots must still agree about the size, to find that out


SETTINGS = ("max", "local")


def reduces_amaxes(setting: str | None) -> bool:
    """True if amaxes are reduced over ranks. None means: where there are several ranks."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0
    if setting is None:
        return ranks > 1
    if setting not in SETTINGS:
        raise ValueError(f"amax_reduction expects 'max', 'local' or None, got {setting!r}")
    if setting == "max" and not ranks:
        raise ValueError("amax_reduction='max' needs ranks: call init_process_group() of torch.distributed first")
    return setting == "max"


class AmaxReduction(TrainingPart):
    """``group``: the ranks that share scales; None: all. Gradients found not finite on one rank are so on all."""

    name = "amax_reduction"

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.model, self.group = model, group
        self._layout: _Layout | None = None
        for state in states_within(model).values():
            state.settle()
        request(model, self).held = True

    def inspect(self, step: Step) -> None:
        """One message for both: ranks that looked at their gradients and ranks that had none must not send different
        ones, of which the first would wait for ever or read the other's bytes."""
        layout = self._exchange(step.found_inf)
        if step.found_inf is not None:
            step.found_inf = layout.found_inf()

    def before_step(self, step: Step) -> None:
        if not step.not_finite:  # otherwise LossScaling undoes what was recorded
            self._update()

    def reduce(self) -> None:
        """Put the amaxes of all ranks together and update histories and scales. Every rank must call it."""
        self._exchange(None)
        self._update()

    def _exchange(self, found_inf: Tensor | None) -> _Layout:
        states = states_within(self.model)
        names = [f"{module}:{slot}" for module, state in states.items() for slot, _ in state.slots()]
        looks = found_inf is not None
        new = self._layout is None or (self._layout.names, self._layout.looks) != (names, looks)
        if new:
            device = next((one.device for one in self.model.parameters()), None)
            self._layout = _Layout(names, states, device, looks)
        assert self._layout is not None
        self._layout.exchange(self.group, found_inf, check=new)
        return self._layout

    def _update(self) -> None:
        assert self._layout is not None
        self._layout.take()
        for state in states_within(self.model).values():
            state.update()

    def detach(self) -> None:
        request(self.model, self).held = False


class _Layout:
    """Where the slots of all states are in one tensor: [hash, -hash, found_inf, slots by name, nothing ...] as int32.

    As integers a NaN is above all numbers and the mark of an absent slot below all. The hash is the same on all ranks
    if it is both the largest and the smallest.
    """

    FIRST = 3

    def __init__(
        self, names: list[str], states: dict[str, ScalingState], device: torch.device | None, looks: bool
    ) -> None:
        """``device``: of the message where there are no slots, as under other recipes; NCCL sends none from a CPU.
        ``looks``: steps are skipped for gradients that are not finite, on all ranks or on none."""
        self.names, self.looks = names, looks
        self.tables = [table for state in states.values() for table in state.tables]
        starts, total = [], 0
        for table in self.tables:
            starts.append(total)
            total += table.capacity
        rows, first = [], 0
        for state in states.values():
            rows += [starts[first + place.table] + place.row for _, place in state.slots()]
            first += len(state.tables)
        device = self.tables[0].kind.device if self.tables else device or torch.device("cpu")
        by_name = [row for _, row in sorted(zip(names, rows))]
        self.order = torch.tensor(by_name, dtype=torch.int64, device=device)
        digest = hashlib.sha256("\n".join([f"loss scale: {looks}", *sorted(names)]).encode()).digest()
        self.hash = int.from_bytes(digest[:4], "big") >> 1
        size = -(-(self.FIRST + len(names)) // ROUND_SIZE) * ROUND_SIZE
        self.message = torch.zeros(size, dtype=torch.int32, device=device)

    def exchange(self, group: dist.ProcessGroup | None, found_inf: Tensor | None, *, check: bool) -> None:
        """Fill the message with what is known here; then it has what is known anywhere."""
        self.message[0], self.message[1] = self.hash, -self.hash
        self.message[2] = 0 if found_inf is None else (found_inf > 0).to(self.message)
        self._slots().copy_(self._amaxes()[self.order])
        dist.all_reduce(self.message, dist.ReduceOp.MAX, group=group)
        if check and self.message[:2].tolist() != [self.hash, -self.hash]:
            raise ValueError(
                f"the ranks have not compiled the same matmuls: rank {dist.get_rank()} has {len(self.names)} quantized "
                f"tensors ({', '.join([*sorted(self.names)[:3], '...'])}) and loss scaling "
                f"{'on' if self.looks else 'off'}, others have something else. Expected every rank to run the same "
                "modules before its first step; with pipeline parallelism pass the process_group of those that do, or "
                "amax_reduction='local'"
            )

    def found_inf(self) -> Tensor:
        return self.message[2].to(torch.float32)

    def take(self) -> None:
        """Put what all ranks have recorded where this one would have recorded it."""
        flat = self._amaxes()
        flat[self.order] = self._slots()
        amaxes = [table.amaxes.data for table in self.tables]
        for amax, reduced in zip(amaxes, flat.view(torch.float32).split([len(one) for one in amaxes])):
            amax.copy_(reduced)

    def _slots(self) -> Tensor:
        return self.message[self.FIRST : self.FIRST + len(self.names)]

    def _amaxes(self) -> Tensor:
        """The amaxes of all tables one after the other, as integers; a copy."""
        amaxes: list[Tensor] = [table.amaxes.data for table in self.tables]
        return torch.cat(amaxes).view(torch.int32) if amaxes else self.message[:0].clone()
