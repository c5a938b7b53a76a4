"""Run the compiled code of one graph with the state of its model, call after call.

The code of a training graph that keeps scaling state goes through three phases:

    warming     for ``warmup_steps`` steps     an uncompiled twin in high precision, which records amaxes
    looking     until all slots have a history each tensor is scaled by its own amax, whatever is known of it
    compiled    from then on                   scales come from the state

``ScalingState.epoch`` goes up when histories are replaced: then the phases begin again, as far as they are needed.

Why a graph looks first: it has no history to take scales from until its backward has run once, also where it is called
several times before. CPU code can do both, and a flag in the state chooses. GPU code could look at a tensor first only
by reading every tensor twice, on every run; there the first runs go through another uncompiled twin of the graph. The
FP8 code is compiled at the first call in any case: nothing is left to compile when a phase ends.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Callable, Iterator, Sequence

from torch import Tensor

from fp8_compile.kernels.delayed_scaling import ABSENT
from fp8_compile.passes.graph.slot import Place, Slot
from fp8_compile.scaling.frozen_weights import FrozenWeights
from fp8_compile.scaling.graph_slots import BoundSlots
from fp8_compile.scaling.graph_weights import FreshWeights
from fp8_compile.scaling.recorder import RunRecorder
from fp8_compile.scaling.state import ScalingState
from fp8_compile.torch_internals.autograd import is_recomputation

log = logging.getLogger("fp8_compile")

FIRST_RUNS = 8  # a slot that saw only zeros in its first runs is left at a scale of 1

Code = Callable[..., Any]


class Runner:
    """Call it as the compiled code, with the arguments of the graph.

    A recomputation, of a checkpoint, leaves no trace in the state. It runs inside a backward, under hooks that catch
    what it saves. The state still has the scales of the first run, unless another run has begun since, because what
    that run recorded is taken over only when the next one begins: hidden for a moment, it makes the second run the same
    as the first, bit for bit. (A reentrant checkpoint's first run is without gradients and records nothing. Its
    recomputation, without hooks, is the one that counts.)
    """

    def __init__(
        self,
        compiled: Code,
        state: ScalingState | None,
        slots: BoundSlots | None = None,
        inputs: Sequence[Tensor] = (),
        fresh: FreshWeights | FrozenWeights | None = None,
        *,
        trains: bool,
        looking: Code | None = None,
        warming: Code | None = None,
        warmup_steps: int = 0,
        recorder: RunRecorder | None = None,
    ) -> None:
        """``state``: of the model, under delayed scaling; ``slots``: the graph's in it; None or empty: it reads none.
        ``inputs``: what the codes are given after the arguments. ``looking``: the twin that looks; None where the
        compiled code can do that itself. ``warming``: the twin for the first steps, if there are any."""
        self.compiled, self.looking, self.warming, self.warmup_steps = compiled, looking, warming, warmup_steps
        self.state, self.inputs, self.fresh = state, tuple(inputs), fresh
        self.trains, self.recorder = trains, recorder
        places = slots.places if slots is not None else {}
        self._waits_for, self._slots = places, list(places.values())
        self.tables = [slots.state.tables[index] for index in {place.table for place in self._slots}] if slots else []
        self._looks = bool(places) and slots is not None and not slots.frozen
        # What was found out about the state, each with the epoch in which it was.
        self._complete = -1  # all histories are there
        self._without: tuple[int, dict[Slot, Place]] = (-1, {})  # the slots that had no history at first
        self._runs: tuple[int, int] = (-1, 0)  # how many runs the slots have seen, for the warm-up

    def __call__(self, *args: Any) -> Any:
        if self.fresh is not None:
            self.fresh(args)
        state = self.state
        if state is None:
            return self.compiled(*args, *self.inputs)
        if not self.trains and (copies := state.weights) is not None:
            # To evaluate a model, users put other weights into it through .data, which no version counter tells.
            copies.distrust()
        if self.tables and is_recomputation():
            with self._hidden():
                return self._code(args, again=True)(*args, *self.inputs)
        if self.recorder is not None:
            self.recorder.begin_run()
        if not self._looks or (self.warming is None and self._complete == state.epoch):
            return self.compiled(*args, *self.inputs)
        return self._code(args, again=False)(*args, *self.inputs)

    def _code(self, args: tuple[Any, ...], *, again: bool) -> Code:
        """The code of the phase that the graph is in. ``again``: this is a recomputation."""
        assert self.state is not None
        if self.warming is not None and self._is_warming(again):
            return self.warming
        if not self._looks or self._complete == self.state.epoch:
            return self.compiled
        # A recomputation has the scales of the first time, though backward may have filled histories since.
        if again or self._is_looking():
            return self.looking or self.compiled
        return self.compiled

    def _is_warming(self, again: bool) -> bool:
        """True for the first steps: of the optimizer where one is attached, otherwise runs of this graph."""
        assert self.state is not None
        epoch, runs = self._runs
        if epoch != self.state.epoch:  # the first time, and when a state was loaded or forgotten
            runs = self.state.runs(self._slots)
        done = runs if self.state.steps is None else self.state.steps
        warming = done < self.warmup_steps
        self._runs = self.state.epoch, runs + (warming and not again)
        return warming

    def _is_looking(self) -> bool:
        """True if histories are missing. A tensor that was zero in all its first runs is not waited for."""
        assert self.state is not None
        missing = self.state.without_history(self._waits_for)
        if self._without[0] != self.state.epoch:
            self._without = self.state.epoch, {slot: self._waits_for[slot] for slot in missing}
        if any(runs < FIRST_RUNS for runs in missing.values()):
            self.state.begin_looking(self._without[1])
            return True
        self.state.finish_looking(self._waits_for)
        if missing and self.looking is not None:
            log.warning(
                "%d tensors were zero or not finite in the first %d runs and start with a scale of 1: %s",
                len(missing),
                FIRST_RUNS,
                ", ".join(map(str, missing)),
            )
            self.state.start_at_one(self._waits_for[slot] for slot in missing)
        self._complete = self.state.epoch
        return False

    @contextlib.contextmanager
    def _hidden(self) -> Iterator[None]:
        """Hide what was recorded meanwhile, and forget what is recorded."""
        kept = [(table.amaxes.clone(), table.stats.clone()) for table in self.tables]
        for table in self.tables:
            table.amaxes.data.fill_(ABSENT)
        try:
            yield
        finally:
            for table, (amaxes, stats) in zip(self.tables, kept):
                table.amaxes.data.copy_(amaxes)
                table.stats.data.copy_(stats)
