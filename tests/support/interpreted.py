"""Run Triton kernels in the interpreter, in a process that also compiles them.

``TRITON_INTERPRET=1`` is read when a kernel is decorated, once and for the whole process. ``interpreted(module)`` gives
the same for the length of a block: every jitted function of the module, and of ``triton.language``, is replaced by an
interpreted twin, and all that the interpreter patches is put back.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any, Iterator

import numpy as np
import torch
import triton.experimental.gluon  # noqa: F401  the first launch imports it, and it would meet twins
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from fp8_compile.kernels.gpu.interpreter import corrected

LANGUAGE = (tl, tl.standard, tl.random)
# What the interpreter patches. A device function (``tl.max``) patches at each call and never restores: triton 3.7.
PATCHED = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)


class Twin(interpreter.InterpretedFunction):
    """An interpreted function that, called from another one, patches nothing anew: ``interpreted`` did it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)


@contextlib.contextmanager
def interpreted(*modules: types.ModuleType, correct: bool = True) -> Iterator[None]:
    """Interpret the kernels of these modules; ``correct=False`` leaves Triton's wrong FP8 rounding in place."""
    places = {id(place): place for place in (*modules, *LANGUAGE, *PATCHED)}.values()
    before = [(place, dict(vars(place))) for place in places]
    twins: dict[int, Twin] = {}  # by identity: hashing a jitted function reads its globals
    Twin.rewritten_fn = {}  # what is rewritten needs the names that are taken away again below
    with corrected() if correct else contextlib.nullcontext():
        for place in (*modules, *LANGUAGE):
            for name, value in list(vars(place).items()):
                if isinstance(value, JITFunction):
                    value = vars(place).get("INTERPRETED", {}).get(name, value)
                    setattr(place, name, twins.setdefault(id(value), Twin(value.fn)))
        try:
            interpreter._patch_lang(_sees_the_language)
            with np.errstate(all="ignore"):  # Inf - Inf and 1 / 0 are part of the tests, as on a GPU
                yield
        finally:
            for place, names in before:
                for name in vars(place).keys() - names.keys():
                    delattr(place, name)
                for name, value in names.items():
                    if vars(place)[name] is not value:
                        setattr(place, name, value)


def check_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same shape, dtype and bits, the sign of a zero included; a NaN may be any NaN."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    assert actual.is_contiguous() or actual.numel() == 0
    if not actual.is_floating_point():
        assert torch.equal(actual, expected)
        return
    wide, wanted = actual.double(), expected.double()
    assert torch.equal(wide.isnan(), wanted.isnan())
    wide, wanted = (x[~x.isnan()] for x in (wide, wanted))
    assert torch.equal(wide, wanted) and torch.equal(wide.signbit(), wanted.signbit())


def _sees_the_language() -> tuple[types.ModuleType, types.ModuleType]:
    """``_patch_lang`` patches the language modules among a function's globals."""
    return tl, core


core = tl.core
