"""What is done around ``optimizer.step()`` comes in parts; each is an object with these methods.

    inspect          the gradients are there and nothing is decided: a part may raise ``step.found_inf``
    before_step      it is decided whether the step is skipped (``step.skipped``); the optimizer has not run
    next_evaluation  the optimizer calls its closure again, as LBFGS does; then all begins with ``inspect`` again
    after_step       the optimizer has run, or would have
    failed_step      instead, if anything raised since ``inspect``
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from torch import Tensor
from torch.optim import Optimizer


@dataclasses.dataclass
class Step:
    """One ``optimizer.step()``."""

    optimizer: Optimizer
    found_inf: Tensor | None = None  # [] fp32, above 0: a gradient is not finite. None: no one looked
    saturated: bool = False  # a gradient lost too much, and such steps are to be skipped
    skipped: bool = False

    @property
    def not_finite(self) -> bool:
        """True if it is skipped because of a gradient that is not finite: then nothing that it recorded is kept."""
        return self.skipped and not self.saturated


class TrainingPart:
    """Does nothing: a part overrides what it needs. ``name`` is its key in ``Training.state_dict()``."""

    name = ""

    def inspect(self, step: Step) -> None:
        """Look at the gradients; without waiting for the device."""

    def before_step(self, step: Step) -> None:
        """Prepare what the optimizer will read."""

    def next_evaluation(self, step: Step) -> None:
        """Forget what the gradients of the last evaluation were judged by: new ones come."""

    def after_step(self, step: Step) -> None:
        """Take over what the optimizer has written; of a skipped step, undo what led to it."""

    def failed_step(self, step: Step) -> None:
        """Leave model and optimizer as torch leaves them without the part: with what was done until then."""

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers; empty: nothing to save."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a saved state over."""

    def detach(self) -> None:
        """Leave model and optimizer as if the part had never been there."""
