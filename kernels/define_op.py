"""Operations of ours as torch knows them: one function for every device, and one that tells the results' shapes."""

from __future__ import annotations

from typing import Any, Callable

import torch

from .operands import on_one_device

library = torch.library.Library("fp8_compile", "FRAGMENT")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register ``name(arguments) -> results``; gradients do not go through it."""
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8_compile::{name}", on_one_device(name, fake), lib=library)
    return getattr(torch.ops.fp8_compile, name).default
