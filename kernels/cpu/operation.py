"""Operations of ours on CPU tensors, as torch knows them."""

from __future__ import annotations

from typing import Any, Callable

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # fp8_formats.h: Dtype

_library = torch.library.Library("fp8_compile", "FRAGMENT")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register ``fp8_compile::name(...)`` with what it does and what comes out; to Inductor it is opaque."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CPU")
    torch.library.register_fake(f"fp8_compile::{name}", fake, lib=_library)
    return getattr(torch.ops.fp8_compile, name).default
