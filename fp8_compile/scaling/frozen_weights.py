"""Weights under frozen scales: they keep the scale that training had for them, as long as it fits them.

A frozen weight has the codes that a training forward gives it, and that ``pack(model, scales="training")`` stores. One
that someone replaces may be of any size. So before each run it is looked at whether weights are as they were, by
version counters and, on a CPU, by fingerprints; one that no longer fits takes its own scale, with a line in the log.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from torch import Tensor

from fp8_compile.kernels.cpu.fingerprint import Fingerprints
from fp8_compile.kernels.delayed_scaling import fits, scale_of
from fp8_compile.kernels.quantize import WHOLE, block_amax
from fp8_compile.passes.graph.slot import Place, Slot
from fp8_compile.torch_internals.autograd import are_as_seen, version
from fp8_compile.torch_internals.modules import local_part

from .requests import Changes

if TYPE_CHECKING:
    from .state import ScalingState

log = logging.getLogger("fp8_compile")


class FrozenWeights:
    """Call it with the arguments of an inference graph before it runs: the scales of its weights fit them then."""

    def __init__(self, state: ScalingState, read: Mapping[int, tuple[Slot, Place]]) -> None:
        """``read``: argument of the graph -> slot of the weight, and the place that it has among frozen scales."""
        self.state, self.read = state, dict(read)
        self._changes = -1
        self._seen: list[tuple[int, int, int]] = []
        self._fingerprints, self._expected = Fingerprints(), list[int]()
        self._replaced: set[Slot] = set()

    def __call__(self, args: Sequence[Any]) -> None:
        if self._changes == Changes.count and are_as_seen(args, self._seen):
            if self._fingerprints.again() == self._expected:
                return
        weights = {index: local_part(args[index]) for index in self.read}
        for index, weight in weights.items():
            self._fit(*self.read[index], weight)
        counted = [index for index in self.read if args[index] is weights[index] and not args[index].is_inference()]
        self._seen = [(index, version(args[index]), args[index].data_ptr()) for index in counted]
        on_cpu = [one for one in weights.values() if one.is_cpu and one.is_contiguous() and one.numel()]
        self._expected = self._fingerprints(on_cpu)
        self._changes = Changes.count if len(counted) == len(self.read) else -1

    def _fit(self, slot: Slot, at: Place, weight: Tensor) -> None:
        table, reach = self.state.tables[at.table], self.state.frozen_reach(slot)
        assert reach is not None, slot
        largest = table.kind.largest
        amax = block_amax(weight.detach().reshape(1, -1), (WHOLE, WHOLE))
        if fits(amax * (largest / reach), largest) or not 0 < float(amax) < float("inf"):
            table.freeze(at.row, reach, exactly=True)
            return
        table.freeze(at.row, largest / float(scale_of(amax, largest)), exactly=True)
        if slot not in self._replaced:
            self._replaced.add(slot)
            log.warning("%s no longer fits its frozen scale and takes its own; freeze_scales() again settles it", slot)
