"""The only way to register an operation of ours: its formula, the shapes of its results, and faster ways by device.

    mm_op = define(
        "fp8_mm(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor",
        product,                                                        the reference, in plain PyTorch
        lambda x, codes, scales, bias: x.new_empty(...),                the fake: empty results
        cpu="fp8_compile.kernels.cpu.fp8_weight:product",               on a CPU without C++, imported on the first call
        cuda=...,
    )

The dispatcher chooses by the device of the tensors; the formula is what runs on every device that has nothing faster. A
result of a fake is what a graph is traced with. Gradients do not go through an operation, unless ``gradient`` says how.

An operation with a function for the CPU has an implementation in C++ too, in ``kernels/cpu/operations.cpp``. The first
call on a CPU compiles and registers those of all operations; from then on the dispatcher calls no Python. Without a
compiler it calls the function, which checks its arguments as the C++ does. ``fp8_compile::<name>_formula`` calls the
function in any case.
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


def define(
    schema: str,
    reference: Implementation,
    fake: Implementation | None,
    *,
    cpu: Implementation | str | None = None,
    cuda: Implementation | str | None = None,
    gradient: Implementation | None = None,
    keep: Implementation | None = None,
) -> Any:
    """Register ``name(arguments) -> results`` and return the operation.

    An implementation is a function, or "module:function" where importing the module takes time. ``fake=None``: the
    operation writes to what it is given and makes no tensor. ``gradient(ctx, *grads)`` gives those of the arguments;
    ``keep(ctx, inputs, output)`` saves what it needs for that.
    """
    name, _, arguments = schema.partition("(")
    _library.define(schema)
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.fp8_compile, base), overload or "default")
    if cpu is not None:
        reference = _OnCpu(op, _callable(cpu), reference)
        _library.define(f"{name}_formula({arguments}")
        _library.impl(f"{name}_formula", reference.formula, "CompositeExplicitAutograd")
    _library.impl(name, reference, "CompositeExplicitAutograd")
    if cuda is not None:
        _library.impl(name, _callable(cuda), "CUDA")  # AMD's, too
    if fake is not None:
        torch.library.register_fake(f"fp8_compile::{name}", on_one_device(name, fake), lib=_library)
    if gradient is not None:
        torch.library.register_autograd(f"fp8_compile::{name}", gradient, setup_context=keep, lib=_library)
    return op


class _OnCpu:
    """What runs until the dispatcher has the C++, and where there is none: the function for the CPU there, on other
    devices the reference."""

    def __init__(self, op: Any, formula: Implementation, reference: Implementation) -> None:
        self.op, self.formula, self.reference = op, formula, reference
        self.asked = False

    def __call__(self, *given: Any, **named: Any) -> Any:
        if not given[0].is_cpu:
            return self.reference(*given, **named)
        from .cpu import operations

        if not self.asked:
            there = operations.registered()
            self.asked = True
            if there:
                return self.op(*given, **named)
        return self.formula(*given, **named)


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
