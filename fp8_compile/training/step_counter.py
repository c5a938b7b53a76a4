"""The part of training that counts the optimizer's steps and saves them with the scaling state."""

from __future__ import annotations

from typing import Any, Mapping, SupportsIndex

from torch import nn

from fp8_compile.scaling.find_state import scaling_state, states_within
from fp8_compile.scaling.model_state import model_state
from fp8_compile.scaling.precision import set_precision
from fp8_compile.scaling.state import ScalingState
from fp8_compile.torch_internals.modules import is_compiled, unwrap

from .part import Step, TrainingPart


class StepCounter(TrainingPart):
    """``steps`` counts those of the optimizer, without skipped ones. A warm-up goes by it; where several optimizers
    train a module, by the one with the most steps. The scaling state is saved by module."""

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
        if not isinstance(states, Mapping) or not isinstance(steps, SupportsIndex):
            raise TypeError(
                f"the saved scaling has states of {type(states).__name__} and steps={steps!r}; expected what attach's "
                "state_dict() gives: a dict by module, and a number of steps"
            )
        # All are checked before any is changed: a state that does not fit leaves the model as it was.
        take_overs = [self._state_of(name).checked(saved) for name, saved in states.items()]
        set_precision(self.model)  # as it is unless a state says otherwise
        for take_over in take_overs:
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
        for module in self._modules():
            counts = model_state(module).step_counts
            counts.discard(self)
            scaling_state(module).steps = max((one.steps for one in counts), default=None)

    def _tell(self) -> None:
        for module in self._modules():
            counts = model_state(module).step_counts
            counts.add(self)
            scaling_state(module).steps = max(one.steps for one in counts)

    def _modules(self) -> list[nn.Module]:
        """The model, and the modules in it that are compiled by themselves."""
        return [self.model, *(unwrap(module) for module in self.model.modules() if is_compiled(module))]
