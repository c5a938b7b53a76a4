"""FP32 master weights for 16-bit models: the optimizer updates them, the model gets them rounded.

    master <- optimizer(master, float(gradient))        FP32, inside ``optimizer.step()``
    weight <- bf16(master)                              after it
"""

from __future__ import annotations

import functools
from typing import Any, Iterator, Mapping

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fp8_compile.torch_internals.autograd import copy_all, version
from fp8_compile.torch_internals.modules import local_part

from .part import Step, TrainingPart
from .step_hooks import OnFailure, StepHooks

HALF_DTYPES = (torch.bfloat16, torch.float16)


class MasterWeights(TrainingPart):
    """Masters for the 16-bit parameters of an optimizer, hooked into its ``step()``.

    Outside ``step()`` and ``load_state_dict()`` the optimizer knows the model's parameters, so that ``zero_grad()``,
    clipping, schedulers and checkpoints find what they expect; its state is FP32 at any time. A weight that was changed
    since the last step (``load_state_dict``, an edit in place) is noticed by its version and becomes the master.
    FP16 parameters get FP32 gradients (``grad_dtype``): what a loss scale has saved would be lost in FP16 again.
    """

    name = "master_weights"

    def __init__(self, optimizer: Optimizer, names: Mapping[Tensor, str] | None = None, *, hooks: bool = True) -> None:
        """``names``: of parameters, as keys of ``state_dict()``; without them their positions in the optimizer."""
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS has its own list of parameters, which masters can't enter; use another optimizer")
        self.optimizer, self._names = optimizer, names or {}
        self._masters: dict[Tensor, Tensor] = {}
        self._versions: dict[Tensor, int] = {}
        self._inside = False  # the optimizer holds masters
        self._adopt()
        self._handles: list[Any] = [
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._enter()),
            optimizer.register_load_state_dict_post_hook(lambda _: self._leave()),
            OnFailure(optimizer, "load_state_dict", self._leave),
        ]
        if hooks:
            step = Step(optimizer)
            methods = (self.before_step, self.after_step, self.failed_step)
            self._handles.append(StepHooks(optimizer, *(functools.partial(method, step) for method in methods)))

    def fp32_params(self) -> list[Tensor]:
        """What the optimizer updates, in its order: masters, and parameters that are not 16-bit themselves."""
        self._adopt()
        return [self._masters.get(parameter, parameter) for parameter in self._parameters()]

    @torch.no_grad()
    def sync(self) -> None:
        """Make weights and masters agree: a weight that was changed since the last step becomes the master, every other
        weight gets its master, rounded."""
        self._take_edits()
        self._adopt()
        if self._masters:
            copy_all(list(self._masters), list(self._masters.values()))
        self._remember()

    def memory_bytes(self) -> int:
        """Of the masters on this process."""
        return sum(local_part(master).numel() * 4 for master in self._masters.values())

    def before_step(self, step: Step) -> None:
        if step.skipped:
            return
        self._adopt()
        self._take_edits()
        grads = {parameter: parameter.grad for parameter in self._masters if parameter.grad is not None}
        narrow = {p: g for p, g in grads.items() if g.dtype != torch.float32 and not g.is_sparse}
        wide = {p: torch.empty_like(g, dtype=torch.float32) for p, g in narrow.items()}
        if wide:
            copy_all(list(wide.values()), list(narrow.values()))
        for parameter, master in self._masters.items():
            gradient = wide.get(parameter, grads.get(parameter))
            master.grad = None if gradient is None else gradient.to(torch.float32)
        self._enter()

    def after_step(self, step: Step) -> None:
        self._leave()
        if step.skipped:
            return
        updated = {p: master for p, master in self._masters.items() if master.grad is not None}
        if updated:
            copy_all(list(updated), list(updated.values()))
        for master in self._masters.values():
            master.grad = None  # on a 16-bit model as large as the masters
        self._remember()

    def failed_step(self, step: Step) -> None:
        """As after one that succeeded: some masters may have been updated when it raised, and weights follow them."""
        self.after_step(step)

    def state_dict(self) -> dict[str, Any]:
        """Copies of the masters, by the names of their parameters."""
        self._take_edits()
        return {self._name(p, i): self._masters[p].detach().clone() for i, p in self._with_master()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take saved masters over; the weights get them, rounded."""
        self._adopt()
        masters = {self._name(p, i): self._masters[p] for i, p in self._with_master()}
        if set(masters) != set(state_dict):
            odd = sorted(set(masters) ^ set(state_dict))
            raise ValueError(
                f"the saved masters do not fit the optimizer's 16-bit parameters; on one side only: {', '.join(odd)}. "
                "Expected a state_dict() of the same model in the same dtypes"
            )
        for name, master in masters.items():
            master.copy_(state_dict[name])
        self._remember()
        self.sync()

    def detach(self) -> None:
        self._leave()
        for handle in self._handles:
            handle.remove()
        for parameter in self._masters:
            _set_grad_dtype(parameter, parameter.dtype)

    def _parameters(self) -> Iterator[Tensor]:
        assert not self._inside
        return (parameter for group in self.optimizer.param_groups for parameter in group["params"])

    def _with_master(self) -> list[tuple[int, Tensor]]:
        self._adopt()
        return [(i, parameter) for i, parameter in enumerate(self._parameters()) if parameter in self._masters]

    def _name(self, parameter: Tensor, index: int) -> str:
        return self._names.get(parameter, str(index))

    def _adopt(self) -> None:
        """Make masters for parameters that the optimizer has got since the last time."""
        for parameter in self._parameters():
            if parameter.dtype in HALF_DTYPES and parameter not in self._masters:
                self._masters[parameter] = parameter.detach().to(torch.float32).requires_grad_(parameter.requires_grad)
                self._versions[parameter] = _version(parameter)
                state = self.optimizer.state.get(parameter, {})  # of one that makes it when it is constructed
                state.update({key: item.to(torch.float32) for key, item in state.items() if _is_half(item)})
                if parameter.dtype == torch.float16:
                    _set_grad_dtype(parameter, torch.float32)

    @torch.no_grad()
    def _take_edits(self) -> None:
        edited = [p for p in self._masters if _version(p) != self._versions[p]]
        if edited:
            copy_all([self._masters[p] for p in edited], edited)
        self._remember()

    def _remember(self) -> None:
        self._versions = {parameter: _version(parameter) for parameter in self._masters}

    def _enter(self) -> None:
        if not self._inside:
            self._adopt()
            self._exchange(self._masters)
            self._inside = True

    def _leave(self) -> None:
        if self._inside:
            self._exchange({master: parameter for parameter, master in self._masters.items()})
            self._inside = False

    def _exchange(self, other: Mapping[Tensor, Tensor]) -> None:
        """Let the optimizer hold the other ones: in its groups and as keys of its state."""
        for group in self.optimizer.param_groups:
            group["params"] = [other.get(tensor, tensor) for tensor in group["params"]]
        state = self.optimizer.state
        for old, new in other.items():
            if old in state:
                state[new] = state.pop(old)


def _is_half(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in HALF_DTYPES


def _version(parameter: Tensor) -> int:
    return version(local_part(parameter))


def _set_grad_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.grad_dtype = dtype
    parameter.grad = None if gradient is None else gradient.to(dtype)
