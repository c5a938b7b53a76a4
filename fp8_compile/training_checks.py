"""Mistakes in the use of ``attach``, found when it is called."""

from __future__ import annotations

import gc
from typing import Any, Callable

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch.optim import Optimizer

from .graph_loss_scale import was_compiled
from .master_weights import HALVES

WITHOUT_PASSES = ("eager", "aot_eager", "inductor", "cudagraphs")


def unwrap_model(model: Any) -> nn.Module:
    """The user's module, without what compiling and ``DistributedDataParallel`` put around it."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach expects a compiled module, got {type(model).__name__}; of a compiled function, compile the module "
            "it runs instead: model = torch.compile(model, backend='fp8')"
        )
    while True:
        if isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer of ``torch.optim`` in those of accelerate and Lightning."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"attach expects an optimizer of torch.optim, got {type(optimizer).__name__}")
    return optimizer


def check_compiled(given: nn.Module, module: nn.Module) -> None:
    """The model, or modules in it, or one that it is in, must have been given to ``torch.compile``."""
    wrappers = [inner for inner in given.modules() if isinstance(inner, OptimizedModule)]
    wrappers += [] if wrappers else _wrapped_elsewhere(module)
    other = [name for wrapper in wrappers if (name := _backend_name(wrapper)) in WITHOUT_PASSES]
    if other and len(other) == len(wrappers):
        raise ValueError(
            f"the model is compiled with backend={other[0]!r}, which does no FP8; expected torch.compile(model, "
            "backend='fp8')"
        )
    in_place = any(inner._compiled_call_impl is not None for inner in module.modules())
    if not (wrappers or in_place or was_compiled(module) or _compiled_by_lightning(module)):
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
        {id(parameter) for group in one.param_groups for parameter in group["params"] if parameter.dtype in HALVES}
        for one in (optimizer, *others)
    )
    return mine & set().union(*theirs)


def _wrapped_elsewhere(module: nn.Module) -> list[OptimizedModule]:
    """What ``torch.compile`` returned for a module whose user passes the plain one."""
    return [item for item in gc.get_objects() if type(item) is OptimizedModule and item._orig_mod is module]


def _compiled_by_lightning(module: nn.Module) -> bool:
    """Lightning takes the wrapper off and notes that there was one."""
    return getattr(module, "_compiler_ctx", None) is not None


def _backend_name(wrapper: OptimizedModule) -> str:
    backend = innermost_backend(wrapper.dynamo_ctx.callback)  # type: ignore[arg-type]
    if isinstance(backend, torch._TorchCompileInductorWrapper):
        return "inductor"
    return getattr(backend, "compiler_name", "")
