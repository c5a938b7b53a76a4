"""The part of training that keeps FP8 copies of the weights, renewed once per step of the optimizer."""

from __future__ import annotations

from torch import nn

from fp8_compile.scaling.find_state import states_within
from fp8_compile.scaling.model_state import request
from fp8_compile.scaling.weight_cache import WeightCache, mark_stepped

from .part import Step, TrainingPart


class WeightCaching(TrainingPart):
    """Weights are quantized once per step, all of them in one launch; see ``weight_cache.py``.

    Code that was compiled before is compiled again at its next call. Detached, code goes on with its copies, which
    are renewed whenever a weight has changed; what is compiled from then on has none.
    """

    name = "weight_cache"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        request(model, self).cached = True

    @property
    def caches(self) -> list[WeightCache]:
        found = [state.weights for state in states_within(self.model).values()]
        return [cache for cache in found if cache is not None]

    def after_step(self, step: Step) -> None:
        # The new weights may have been written past the version counters, by master weights for instance. Only those
        # of this optimizer are marked: others may wait for a backward that reads the copies as they are.
        if not step.skipped:
            mark_stepped(step.optimizer)

    def failed_step(self, step: Step) -> None:
        self.after_step(step)  # some weights may have been written

    def memory_bytes(self) -> int:
        """What the copies take."""
        return sum(cache.memory_bytes() for cache in self.caches)

    def detach(self) -> None:
        request(self.model, self).cached = False
