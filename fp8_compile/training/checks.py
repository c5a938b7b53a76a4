"""Mistakes in the use of ``attach``, found when it is called."""

from __future__ import annotations

import gc
from typing import Any, Callable

from torch import nn
from torch.optim import Optimizer

from fp8_compile.scaling.loss_scale import was_compiled
from fp8_compile.torch_internals.dynamo import backend_name, wrappers_of, wrappers_within
from fp8_compile.torch_internals.modules import compiled_in_place, unwrap, unwrapped_by_lightning

from .master_weights import HALF_DTYPES

WITHOUT_PASSES = ("eager", "aot_eager", "inductor", "cudagraphs")


def unwrap_model(model: Any) -> nn.Module:
    """The user's module, without what compiling and ``DistributedDataParallel`` put around it."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach expects a compiled module, got {type(model).__name__}; of a compiled function, compile the module "
            "it runs instead: model = torch.compile(model, backend='fp8')"
        )
    return unwrap(model)


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer of ``torch.optim`` in those of accelerate and Lightning."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"attach expects an optimizer of torch.optim, got {type(optimizer).__name__}")
    return optimizer


def check_compiled(given: nn.Module, module: nn.Module) -> None:
    """The model, or modules in it, or one that it is in, must have been given to ``torch.compile``."""
    wrappers = wrappers_within(given)
    wrappers += [] if wrappers else wrappers_of(module)
    other = [name for wrapper in wrappers if (name := backend_name(wrapper)) in WITHOUT_PASSES]
    if other and len(other) == len(wrappers):
        raise ValueError(
            f"the model is compiled with backend={other[0]!r}, which does no FP8; expected torch.compile(model, "
            "backend='fp8')"
        )
    in_place = any(compiled_in_place(inner) for inner in module.modules())
    if not (wrappers or in_place or was_compiled(module) or unwrapped_by_lightning(module)):
        raise ValueError(
            f"{type(module).__name__} is not compiled, so there is no graph to attach to; expected "
            "model = torch.compile(model, backend='fp8') before attach(model, optimizer)"
        )


def check_owner(module: nn.Module, optimizer: Optimizer) -> None:
    """The optimizer must train this model."""
    own = {id(parameter) for parameter in module.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in own for parameter in given):
        raise ValueError(
            f"none of the optimizer's {len(given)} parameters is one of {type(module).__name__}'s {len(own)}; expected "
            "the optimizer of this model, made after the model was moved or converted: "
            f"{type(optimizer).__name__}(model.parameters(), ...)"
        )


def check_once(module: nn.Module, optimizer: Optimizer, attached: nn.Module | None) -> None:
    """An optimizer is attached to one model: ``attached``, None if to none yet. A model may have several optimizers."""
    model, step = type(module).__name__, type(optimizer).__name__
    if attached is module:
        raise ValueError(
            f"{model} and this {step} are attached already; expected one attach() for a model and its optimizer, or "
            "train.detach() before the next"
        )
    if attached is not None:
        raise ValueError(
            f"this {step} is attached already, to {type(attached).__name__}, and can't be attached to {model} too; "
            "expected one optimizer for each, or one attach() of a module that has both: "
            f"attach(nn.ModuleList([{type(attached).__name__.lower()}, {model.lower()}]), optimizer)"
        )


def check_masters(optimizer: Optimizer, others: Callable[[], list[Optimizer]]) -> None:
    """A parameter has one master: that of a second optimizer would be rounded to 16 bits by each step of the first.
    ``others``: the optimizers that have masters."""
    if _with_two_masters(optimizer, others()):
        gc.collect()  # an optimizer that was dropped is kept by its own hooks until then
    if count := len(_with_two_masters(optimizer, others())):
        raise ValueError(
            f"{count} parameters of this {type(optimizer).__name__} have FP32 masters by another attached optimizer, "
            "and the steps of each would round the other's masters to 16 bits; expected 16-bit parameters in one of "
            "the optimizers only, FP32 parameters, or master_weights=True for one of them"
        )


def _with_two_masters(optimizer: Optimizer, others: list[Optimizer]) -> set[int]:
    """Identities of the 16-bit parameters that are also in others."""
    mine, *theirs = (
        {id(parameter) for group in one.param_groups for parameter in group["params"] if parameter.dtype in HALF_DTYPES}
        for one in (optimizer, *others)
    )
    return mine & set().union(*theirs)
