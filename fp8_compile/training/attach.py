"""Everything that FP8 training needs around ``optimizer.step()``, attached by one line to a loop that stays as it is.

    train = fp8_compile.attach(model, optimizer, loss_scale="dynamic", master_weights=True)
    for batch in data:
        loss = model(batch); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8_compile.config import Config
from fp8_compile.scaling.coverage import note_step

from .amax_reduction import AmaxReduction, reduces_amaxes
from .checks import check_compiled, check_masters, check_once, check_owner, unwrap_model, unwrap_optimizer
from .loss_scaler import LossScaler
from .loss_scaling import LossScaling
from .master_weights import MasterWeights
from .part import Step, TrainingPart
from .saturation_watch import SaturationWatch
from .step_counter import StepCounter
from .step_hooks import StepHooks
from .weight_caching import WeightCaching


class Training:
    """A model and its optimizer, with parts hooked into ``optimizer.step()``. :func:`attach` makes it.

    A step is skipped where a part found a gradient that is not finite: the optimizer then sees no gradients, which
    every optimizer of ``torch.optim`` takes for nothing to do.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, parts: list[TrainingPart]) -> None:
        self.model, self.optimizer, self.parts = model, optimizer, parts
        self.skipped_steps = 0
        self._step: Step | None = None
        self._noted = False  # the user has been told if nothing of the model runs in FP8
        self._hidden: list[tuple[Tensor, Tensor]] = []  # parameters and their gradients, while a step is skipped
        self._hooks = StepHooks(optimizer, self._prepare, self._finish, self._fail, self._again)
        _trainings[optimizer] = weakref.ref(self)

    def part(self, kind: type[TrainingPart]) -> Any:
        """The part of a kind, None if there is none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def steps(self) -> int:
        """Steps of the optimizer since the start, those of a loaded checkpoint included, skipped ones not."""
        return self.part(StepCounter).steps

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 without loss scaling."""
        return self.part(LossScaling).value

    @property
    def loss_scaler(self) -> LossScaler | None:
        """What follows the gradients under ``loss_scale="dynamic"``."""
        return self.part(LossScaling).scaler

    @property
    def master_weights(self) -> MasterWeights | None:
        return self.part(MasterWeights)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and numbers: all there is to save beside the model's and the optimizer's own state."""
        states = {part.name: part.state_dict() for part in self.parts}
        return {"skipped_steps": self.skipped_steps, **{name: state for name, state in states.items() if state}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a saved state over, after the model's and the optimizer's own; before or after the first forward."""
        known = {"skipped_steps", *(part.name for part in self.parts)}
        if not {"skipped_steps", StepCounter.name} <= set(state_dict) <= known:
            raise ValueError(
                f"a checkpoint with {sorted(state_dict)} does not fit parts {sorted(known)}; "
                "expected a state_dict() of a Training that was attached with the same arguments"
            )
        masters = self.master_weights
        if masters is not None and masters.memory_bytes() and masters.name not in state_dict:
            raise ValueError("the checkpoint has no master weights: it was saved without master_weights=True")
        for part in self.parts:
            if part.name in state_dict:
                part.load_state_dict(state_dict[part.name])
        self.skipped_steps = int(state_dict["skipped_steps"])

    def detach(self) -> None:
        """Take everything off again. Code that was compiled with a loss scale goes on with a scale of 1."""
        self._hooks.remove()
        _trainings.pop(self.optimizer, None)
        for part in reversed(self.parts):
            part.detach()

    def _prepare(self) -> None:
        self._step = step = Step(self.optimizer)
        for part in self.parts:
            part.inspect(step)
        not_finite = step.found_inf is not None and bool(step.found_inf)  # waits for the device, once
        step.saturated &= not not_finite
        step.skipped = not_finite or step.saturated
        for part in self.parts:
            part.before_step(step)
        if step.skipped:
            self._hide_gradients()

    def _again(self) -> None:
        """An optimizer such as LBFGS evaluates its closure again: the gradients to come are judged by themselves."""
        step, self._step = self._step, None
        if step is not None:
            self._show_gradients()
            for part in self.parts:
                part.next_evaluation(step)

    def _finish(self) -> None:
        step, self._step = self._step, None
        if step is None:  # a closure that the optimizer never called
            return
        self._show_gradients()
        for part in self.parts:
            part.after_step(step)
        self.skipped_steps += step.skipped
        if not self._noted:
            self._noted = True
            note_step(self.model)

    def _fail(self) -> None:
        """The step has raised. It may be tried again: what the gradients are known by stays, their overflows too."""
        step, self._step = self._step, None
        if step is None:  # before the gradients were there, in a closure
            return
        self._show_gradients()
        for part in self.parts:
            part.failed_step(step)

    def _hide_gradients(self) -> None:
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._hidden = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    def _show_gradients(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()


_trainings: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Training]] = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    loss_scale: float | str | LossScaler | None = None,
    master_weights: bool = False,
    weight_cache: bool = True,
    saturation: str | None = None,
    *,
    amax_reduction: str | None = None,
    process_group: Any = None,
) -> Training:
    """Hook what FP8 training needs into ``optimizer.step()``: after ``torch.compile``, before the first forward.

    ``loss_scale``      None: as the options of ``torch.compile`` say. A number: fixed. ``"dynamic"``: halved after a
                        step with gradients that are not finite, doubled after 2000 good steps; a :class:`LossScaler`
                        sets other numbers. Such steps are skipped, as if they had never been.
    ``master_weights``  keep the 16-bit parameters in FP32 for the optimizer.
    ``weight_cache``    quantize weights once per step of the optimizer, not in every forward.
    ``saturation``      ``"skip"``: skip a step in which a gradient lost more than half of its largest value because
                        its scale was too old. None: such steps count, and the log says so.
    ``amax_reduction``  ``"max"``: every rank of ``process_group`` (None: all) has the scales of all of them.
                        ``"local"``: its own. None: ``"max"`` where there are several ranks.
    """
    module, optimizer = unwrap_model(model), unwrap_optimizer(optimizer)
    check_compiled(model, module)
    check_owner(module, optimizer)
    before = _trainings[optimizer]() if optimizer in _trainings else None
    check_once(module, optimizer, before.model if before is not None else None)
    reduces = reduces_amaxes(amax_reduction)
    if saturation not in (None, "skip"):
        raise ValueError(f"saturation expects None or 'skip', got {saturation!r}")
    if master_weights:
        check_masters(optimizer, _optimizers_with_masters)
    if isinstance(loss_scale, LossScaler) and not loss_scale.is_enabled():
        loss_scale = None
    scaler = loss_scale if isinstance(loss_scale, LossScaler) else None
    setting = "dynamic" if isinstance(loss_scale, LossScaler) else Config(loss_scale=loss_scale).loss_scale
    scaling = LossScaling(module, setting, scaler)
    # The order matters. Before the decision, parts that raise found_inf come before the one that reduces it over ranks.
    # After the step, masters are rounded into the weights before anything reads those. Parts that change amaxes do so
    # in before_step, because LossScaling keeps a copy of them in after_step.
    parts: list[TrainingPart] = [StepCounter(module), scaling]
    if master_weights:
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        parts.append(MasterWeights(optimizer, names, hooks=False))
    parts.append(SaturationWatch(module, skip=saturation == "skip", group=process_group if reduces else None))
    if reduces:
        parts.append(AmaxReduction(module, process_group))
    if weight_cache:
        parts.append(WeightCaching(module))
    _look_at_fp16(module, scaling, master_weights)
    return Training(module, optimizer, parts)


def _optimizers_with_masters() -> list[Optimizer]:
    found = [training for one in list(_trainings.values()) if (training := one()) is not None]
    return [training.optimizer for training in found if training.master_weights is not None]


def _look_at_fp16(module: nn.Module, scaling: LossScaling, master_weights: bool) -> None:
    """FP16 gradients need their own way out of a graph: what the loss scale saved inside would be lost outside."""
    if not any(parameter.dtype == torch.float16 for parameter in module.parameters()):
        return
    scaling.wide = master_weights
    if scaling.on and not master_weights:
        warnings.warn(
            "the model has FP16 parameters, whose gradients leave the graph in FP16 and are lost below 6e-8, loss "
            "scale or not: attach with master_weights=True, and they leave in FP32",
            stacklevel=3,
        )
