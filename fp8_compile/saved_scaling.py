"""The part of training that counts steps and saves the scaling state with the rest."""

from __future__ import annotations

import weakref
from typing import Any, Mapping

from torch import nn

from .module_names import is_compiled
from .scaling_state import ScalingState, scaling_state, states_within
from .training_part import Part, Step


class SavedScaling(Part):
    """``steps``: of the optimizer, skipped ones not; a warm-up counts these, where several optimizers train a module
    those of the busiest. The state is saved by module."""

    name = "scaling"

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0
        self._tell()

    def after_step(self, step: Step) -> None:
        self.steps += not step.skipped
        self._tell()

    def state_dict(self) -> dict[str, Any]:
        states = {name: state.state_dict() for name, state in states_within(self.model).items()}
        return {"steps": self.steps, "states": {name: state for name, state in states.items() if state}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for name, saved in state_dict["states"].items():
            scaling_state(self.model.get_submodule(name)).load_state_dict(saved)
        self.steps = int(state_dict["steps"])
        self._tell()

    def detach(self) -> None:
        for state in self._states():
            _counting.get(state, set()).discard(self)
            state.steps = max((one.steps for one in _counting.get(state, ())), default=None)

    def _tell(self) -> None:
        for state in self._states():
            _counting.setdefault(state, weakref.WeakSet()).add(self)
            state.steps = max(one.steps for one in _counting[state])

    def _states(self) -> list[ScalingState]:
        """Of the model, and of modules in it that are compiled by themselves."""
        inner = [module for module in self.model.modules() if is_compiled(module)]
        return [scaling_state(module) for module in (self.model, *inner)]


_counting: weakref.WeakKeyDictionary[ScalingState, weakref.WeakSet[SavedScaling]] = weakref.WeakKeyDictionary()
