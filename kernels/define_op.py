"""The only way to register an operation of ours: its formula, the shapes of its results, and faster ways by device.

    mm_op = define(
        "fp8_mm(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor",
        product,                                                        the reference, in plain PyTorch
        lambda x, codes, scales, bias: x.new_empty(...),                the fake: empty results
        cpu="fp8_compile.kernels.cpu.fp8_weight:product",               C++, imported when it is first called
    )

The dispatcher chooses by the device of the tensors; the formula is what runs on every device that has nothing faster. A
result of a fake is what a graph is traced with. Gradients do not go through an operation, unless ``gradient`` says how.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from .operands import on_one_device

_library = torch.library.Library("fp8_compile", "FRAGMENT")
Implementation = Callable[..., Any]
KEYS = {"cpu": "CPU", "cuda": "CUDA"}  # device -> dispatch key; CUDA is AMD's, too


def define(
    schema: str,
    reference: Implementation,
    fake: Implementation | None,
    *,
    cpu: Implementation | str | None = None,
    cuda: Implementation | str | None = None,
    gradient: Implementation | None = None,
) -> Any:
    """Register ``name(arguments) -> results`` and return the operation.

    An implementation is a function, or "module:function" where importing the module takes time. ``fake=None``: the
    operation writes to what it is given and makes no tensor. ``gradient(ctx, *grads)`` gives those of the arguments.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    for device, implementation in (("cpu", cpu), ("cuda", cuda)):
        if implementation is not None:
            _library.impl(name, _callable(implementation), KEYS[device])
    if fake is not None:
        torch.library.register_fake(f"fp8_compile::{name}", on_one_device(name, fake), lib=_library)
    if gradient is not None:
        torch.library.register_autograd(f"fp8_compile::{name}", gradient, lib=_library)
    name, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.fp8_compile, name), overload or "default")


def filled(check: Implementation, allocate: Implementation, write: Implementation) -> Implementation:
    """An implementation for C++ that writes to memory which it is given.

    ``check(*arguments)`` raises an error unless C++ can be given them, ``allocate(*arguments)`` makes empty results
    (one tensor or a tuple), and ``write(*arguments, *results)`` fills them.
    """

    def run(*given: Any) -> Any:
        check(*given)
        made = allocate(*given)
        write(*given, *(made if isinstance(made, tuple) else (made,)))
        return made

    return run


def _callable(implementation: Implementation | str) -> Implementation:
    """The function that a name stands for, imported at the first call."""
    if not isinstance(implementation, str):
        return implementation
    module, _, attribute = implementation.partition(":")

    def call(*given: Any, **named: Any) -> Any:
        return found()(*given, **named)

    @functools.cache
    def found() -> Implementation:
        function: Implementation = getattr(importlib.import_module(module), attribute)
        return function

    return call
