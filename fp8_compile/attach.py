"""Everything that FP8 training needs around ``optimizer.step()``, attached by one line to a loop that stays as it is.

    train = fp8_compile.attach(model, optimizer, loss_scale="dynamic", master_weights=True)
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from .amax_reduction import AmaxReduction, reduces_amaxes
from .loss_scaling import LossScaling
from .module_names import plain_module
from .training_part import Part, Step
from .weight_caching import WeightCaching


class Training:
    """A model and its optimizer, with parts hooked into ``optimizer.step()``. :func:`attach` makes it.

    A step is skipped where a part found a gradient that is not finite: the optimizer then sees no gradients, which
    every optimizer of ``torch.optim`` takes for nothing to do.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, parts: list[Part]) -> None:
        self._model, self.optimizer, self.parts = weakref.ref(model), optimizer, parts
        self.steps = 0  # that were not skipped
        self.skipped_steps = 0
        self._step: Step | None = None
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters and their gradients, while skipping
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "the model is gone"
        return model

    def part(self, name: str) -> Part | None:
        """The part of that name, if there is one."""
        return next((part for part in self.parts if part.name == name), None)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers: all there is to save beside the model's and the optimizer's own state."""
        states = {part.name: part.state_dict() for part in self.parts}
        return {"steps": self.steps, "skipped_steps": self.skipped_steps, **{k: v for k, v in states.items() if v}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a saved state over, after the model's and the optimizer's."""
        self.steps, self.skipped_steps = state_dict["steps"], state_dict["skipped_steps"]
        for part in self.parts:
            if part.name in state_dict:
                part.load_state_dict(state_dict[part.name])

    def detach(self) -> None:
        """Take everything off again."""
        for hook in self._hooks:
            hook.remove()
        for part in reversed(self.parts):
            part.detach()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._prepare()
            return None

        @functools.wraps(closure)
        def then_prepare() -> Any:
            with torch.enable_grad():
                loss = closure()
            self._prepare()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": then_prepare}
        return (args[0], then_prepare, *args[2:]), kwargs

    @torch.no_grad()
    def _prepare(self) -> None:
        self._step = step = Step(self.optimizer)
        for part in self.parts:
            part.inspect(step)
        step.skipped = step.found_inf is not None and bool(step.found_inf)  # waits for the device, once
        for part in self.parts:
            part.before_step(step)
        if step.skipped:
            self._hide_gradients()

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()
        for part in self.parts:
            part.after_step(step)
        self.steps, self.skipped_steps = self.steps + (not step.skipped), self.skipped_steps + step.skipped

    def _hide_gradients(self) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._hidden = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    loss_scale: float | str | None = None,
    master_weights: bool = False,
    weight_cache: bool = True,
    amax_reduction: str | None = None,
    process_group: Any = None,
) -> Training:
    """Hook the parts that are asked for into ``optimizer.step()``.

    ``amax_reduction``: "max" over the ranks of ``process_group`` (None: all), or "local"; None: "max" where there are
    several ranks.
    """
    module = plain_module(model)
    parts: list[Part] = [LossScaling(module, loss_scale)]
    # In this order: who raises found_inf before who reduces it over ranks; masters before who reads the new weights.
    if reduces_amaxes(amax_reduction):
        parts.append(AmaxReduction(module, process_group))
    if weight_cache:
        parts.append(WeightCaching(module))
    return Training(module, optimizer, parts)
