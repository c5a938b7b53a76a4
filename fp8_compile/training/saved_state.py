"""The part of training that counts steps and saves the scaling state with the rest."""

from __future__ import annotations

import weakref
from typing import Any, Mapping

from torch import nn

from fp8_compile.scaling.state import ScalingState, scaling_state, states_within
from fp8_compile.torch_internals.modules import is_compiled

from .part import Part, Step


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
        states, steps = state_dict.get("states"), state_dict.get("steps")
        if not isinstance(states, Mapping) or not hasattr(steps, "__index__"):
            raise TypeError(
                f"the saved scaling has states of {type(states).__name__} and steps={steps!r}; expected what attach's "
                "state_dict() gives: a dict by module, and a number of steps"
            )
        # All are checked before any is changed: a state that does not fit leaves the model as it was.
        for take_over in [self._state_of(name).checked(saved) for name, saved in states.items()]:
            take_over()
        self.steps = int(steps)
        self._tell()

    def _state_of(self, name: str) -> ScalingState:
        try:
            return scaling_state(self.model.get_submodule(name))
        except AttributeError:
            raise ValueError(
                f"the saved scaling is of a module {name!r}, which the model does not have; expected a state of the "
                "same model"
            ) from None

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
