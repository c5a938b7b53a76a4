"""Operations of ours on CPU tensors, as torch and Inductor know them.

To Inductor they are calls of functions that it knows the results' shapes of. (There is no ``out`` variant for memory
that it has planned: it made steps slower, since its buffers are allocated anew where torch's allocator reuses them.)
"""

from __future__ import annotations

from typing import Any, Callable

import torch

from fp8_compile.kernels.operands import on_one_device

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # fp8_formats.h: Dtype

_library = torch.library.Library("fp8_compile", "FRAGMENT")


def define(
    schema: str, check: Callable[..., None], allocate: Callable[..., Any], write: Callable[..., None]
) -> Any:
    """Register ``name(arguments) -> results``. ``check(*arguments)`` raises an error unless C++ can be given them;
    ``allocate(*arguments)`` gives a tuple of empty results, for tracing too; ``write(*arguments, *results)`` fills
    them."""
    name, alone = schema.partition("(")[0], "," not in schema.partition(" -> ")[2]

    def empty(*given: Any) -> Any:
        made = allocate(*given)
        return made[0] if alone else made

    def run(*given: Any) -> Any:
        check(*given)
        made = allocate(*given)
        write(*given, *made)
        return made[0] if alone else made

    _library.define(schema)
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"fp8_compile::{name}", on_one_device(name, empty), lib=_library)
    return getattr(torch.ops.fp8_compile, name).default
