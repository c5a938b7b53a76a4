"""The part of training that scales the loss inside the graphs and skips steps whose gradients are not finite."""

from __future__ import annotations

import gc
import sys
from types import FrameType
from typing import Any, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from fp8_compile.config import Config
from fp8_compile.scaling.history_backup import HistoryBackup
from fp8_compile.scaling.loss_scale import (
    GraphLossScale,
    compiled_without,
    offer,
    offered,
    refuse_contradiction,
    scales_of,
    sharing_graphs,
    withdraw,
)
from fp8_compile.scaling.requests import Changes
from fp8_compile.torch_internals.autograd import largest_magnitudes
from fp8_compile.torch_internals.modules import local_part

from .loss_scaler import LossScaler
from .part import Step, TrainingPart


class LossScaling(TrainingPart):
    """Loss scaling in the graphs of one model.

        scale -> scale / 2, at least 1      after a step with a gradient that is not finite, which is skipped
        scale -> scale * 2                  after ``growth_interval`` good steps
        a number                            stays; a bad step is skipped all the same
        None                                off, unless the options of ``torch.compile`` ask for it
    """

    name = "loss_scale"

    def __init__(self, model: nn.Module, setting: float | str | None, scaler: LossScaler | None = None) -> None:
        self.model, self.setting = model, setting
        self.value = 1.0  # the current loss scale; 1 if it is off
        self.wide = False  # gradients of 16-bit parameters leave in FP32
        self.backup = HistoryBackup(model)
        self.scaler = scaler
        self._good = 0  # steps since the scale was changed: the scaler's growth tracker, without asking the device
        self._refuse_contradiction()
        if setting is not None:
            self._turn_on(setting)
        offer(self)

    def _refuse_contradiction(self) -> None:
        if sharing_graphs(self.model):
            gc.collect()  # an optimizer that was dropped is kept by its own hooks until then
            refuse_contradiction([*sharing_graphs(self.model), self])

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("setting", "wide"):  # code depends on them
            Changes.note()

    @property
    def on(self) -> bool:
        return self.setting is not None

    @property
    def graphs(self) -> list[GraphLossScale]:
        """What the graphs of the model read: one for each module that was compiled by itself."""
        return scales_of(self.model.modules())

    def follow_options(self, config: Config) -> None:
        """A graph is being compiled with these options."""
        if config.loss_scale is not None and self.setting is None:
            self._turn_on(config.loss_scale)
        if config.loss_scale not in (None, self.setting):
            raise ValueError(
                f"loss_scale={config.loss_scale!r} in the options of torch.compile and loss_scale={self.setting!r} in "
                "attach() contradict: give it in one place"
            )

    def inspect(self, step: Step) -> None:
        if not self.on:
            return
        _refuse_grad_scaler()
        parameters = [parameter for group in step.optimizer.param_groups for parameter in group["params"]]
        gradients = [_dense(parameter.grad) for parameter in parameters if parameter.grad is not None]
        # Of a rank that has none yet, nothing is not finite; it must say so, for others wait to hear it.
        flags = [flag for graphs in self.graphs for flag in graphs.largest()]
        largest = [*flags, *_largest(gradients)] or [torch.zeros(1, device=parameters[0].device)]
        device = largest[0].device
        worst = torch.cat([one.to(device) for one in largest])
        found = (~torch.isfinite(worst)).any().to(torch.float32)
        step.found_inf = found if step.found_inf is None else torch.maximum(step.found_inf.to(device), found)

    def next_evaluation(self, step: Step) -> None:
        if not self.on:
            return
        if step.not_finite:
            self.backup.restore()
        self._clear()
        self.backup.keep()

    def after_step(self, step: Step) -> None:
        if not self.on:
            return
        if step.not_finite:
            self.backup.restore()
        self._clear()
        if self.setting == "dynamic" and step.found_inf is not None:
            self._follow(step)
        self.backup.keep()

    def _follow(self, step: Step) -> None:
        """Do here what the scaler does on the device, so that no one has to wait for its result."""
        scaler, value = self.scaler, self.value
        assert scaler is not None and step.found_inf is not None
        scaler.note(step.optimizer, step.found_inf)
        scaler.update()
        self._good = 0 if step.not_finite else self._good + 1
        if step.not_finite:
            value = max(scaler.floor, value * scaler.get_backoff_factor())
        elif self._good == scaler.get_growth_interval():
            grown = value * scaler.get_growth_factor()
            value, self._good = grown if grown <= torch.finfo(torch.float32).max else value, 0
        if value != self.value:
            self._set(value)

    def state_dict(self) -> dict[str, Any]:
        if not self.on:
            return {}
        state = {"setting": self.setting, "scale": self.value}
        return {**state, "scaler": self.scaler.state_dict()} if self.scaler is not None else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self.setting is None:
            self._turn_on(state_dict["setting"])
        if (self.setting == "dynamic") != ("scaler" in state_dict):
            raise ValueError(
                f"the checkpoint was written with loss_scale={state_dict['setting']!r}, "
                f"attach() was called with {self.setting!r}; expected the same kind"
            )
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict["scaler"])
            self._good = state_dict["scaler"]["_growth_tracker"]
            self._set(float(state_dict["scale"]))
        self._clear()
        self.backup.keep()

    def detach(self) -> None:
        withdraw(self)
        self._set(1.0, [module for module in self.model.modules() if not offered([module])])
        self.setting = None

    def _turn_on(self, setting: float | str) -> None:
        if compiled_without(self.model):
            raise ValueError(
                "the model has code for training without a loss scale already; call attach() before the first forward, "
                "or torch._dynamo.reset() before attach()"
            )
        self.setting = setting
        self._clear()  # of runs while nothing was attached
        if setting == "dynamic":
            self.scaler = self.scaler or LossScaler()
            self._good = self.scaler._get_growth_tracker()
            self._set(self.scaler.get_scale())
        else:
            self._set(float(setting))
        self.backup.keep()

    def _set(self, value: float, modules: Iterable[nn.Module] | None = None) -> None:
        """``modules``: those of the model that the new value is for; None: all."""
        self.value, chosen = value, set(self.model.modules() if modules is None else modules)
        for graphs in scales_of(chosen):
            graphs.set(value)
        for state in self.backup.states():
            if state.model in chosen:
                state.set_gradient_unit(value)

    def _clear(self) -> None:
        for graphs in self.graphs:
            graphs.clear()


def _largest(gradients: Iterable[Tensor]) -> list[Tensor]:
    """max |g| over the gradients of each device and dtype, [1] each: a multi-tensor kernel or two, no wait."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    norms = (largest_magnitudes(some) for some in kinds.values())
    return [torch.stack(some).amax().reshape(1).to(torch.float32) for some in norms]


def _dense(gradient: Tensor) -> Tensor:
    """The part of a gradient that is on this rank; of a sparse one, its values."""
    gradient = local_part(gradient)
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _refuse_grad_scaler() -> None:
    """A scaler that is on would scale the loss a second time; it is among those who called ``optimizer.step()``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code in _SCALED_STEPS else None
        if isinstance(owner, GradScaler) and owner.is_enabled():
            raise ValueError(
                f"{type(owner).__name__} and the loss scaling of fp8_compile.attach() are both on: the loss would be "
                "scaled twice. Remove the scaler (loss.backward(); optimizer.step()), or attach with loss_scale=None"
            )
        frame = frame.f_back


_SCALED_STEPS = {GradScaler.step.__code__, GradScaler._maybe_opt_step.__code__}
