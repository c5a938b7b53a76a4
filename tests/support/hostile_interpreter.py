"""Triton's interpreter for code that Inductor wrote: masked lanes are NaN, transcendental functions are PyTorch's."""

from __future__ import annotations

import contextlib
import types
from typing import Any, Callable, Iterator, Sequence
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from interpreted import interpreted
from torch import Tensor
from torch._inductor.runtime import triton_helpers
from triton.runtime import interpreter

from fp8_compile.kernels.gpu import nvfp4_tile, tile

UNWRITTEN = 0xFF  # as FP8, bf16 and fp32, a 0xFF in every byte is NaN


@contextlib.contextmanager
def hostile_interpreter(modules: Sequence[types.ModuleType], *, backwards: bool) -> Iterator[None]:
    """Inside, Triton functions of these modules are interpreted; ``backwards``: the last program of a grid first."""
    builder = interpreter.interpreter_builder
    with contextlib.ExitStack() as stack:
        stack.enter_context(interpreted(triton_helpers, nvfp4_tile, tile, *modules))  # what generated code calls
        for module in (triton_helpers, *modules):
            if hasattr(module, "libdevice"):
                stack.enter_context(mock.patch.object(module, "libdevice", LIBDEVICE))
        stack.enter_context(mock.patch.object(triton_helpers, "max2", _max2))
        stack.enter_context(mock.patch.object(type(builder), "create_masked_load", _create_masked_load))
        stack.enter_context(mock.patch.object(type(builder), "create_exp", _create_exp))
        if backwards:
            stack.enter_context(mock.patch.object(type(builder), "set_grid_idx", _set_grid_idx_from_the_end))
        yield


def _create_masked_load(self: Any, ptrs: Any, mask: Any, other: Any, *hints: Any) -> Any:
    """Triton promises nothing for lanes that are masked out: every bit is set, the NaN that wins over all numbers."""
    if other is None:
        dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
        bits = np.full(np.shape(ptrs.data) + (np.dtype(dtype).itemsize,), UNWRITTEN, np.uint8)
        other = interpreter.TensorHandle(bits.view(dtype)[..., 0], ptrs.get_element_ty())
    return _original_create_masked_load(self, ptrs, mask, other, *hints)


_original_create_masked_load = interpreter.InterpreterBuilder.create_masked_load
_original_set_grid_idx = interpreter.InterpreterBuilder.set_grid_idx


def _set_grid_idx_from_the_end(self: Any, *index: int) -> None:
    _original_set_grid_idx(self, *(size - 1 - i for size, i in zip(self.grid_dim, index)))


def _by_torch(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """A function of Triton tensors."""

    def call(*args: Any) -> Any:
        arrays = np.broadcast_arrays(*(one.handle.data for one in args))
        result = function(*(torch.from_numpy(np.array(array)) for array in arrays)).numpy()
        return tl.tensor(interpreter.TensorHandle(result, args[0].dtype.scalar), args[0].type)

    return call


def _max2(a: Any, dim: int) -> Any:
    """The largest, NaN above all: of a reduction by a function of its own the interpreter makes a call an element."""
    data = torch.from_numpy(np.array(a.handle.data)).amax(dim.value if isinstance(dim, tl.constexpr) else dim).numpy()
    scalar = a.dtype.scalar
    return tl.tensor(interpreter.TensorHandle(data, scalar), tl.block_type(scalar, list(data.shape)))


def _create_exp(self: Any, arg: Any) -> Any:
    return interpreter.TensorHandle(torch.from_numpy(np.array(arg.data)).exp().numpy(), arg.dtype)


LIBDEVICE = types.SimpleNamespace(
    **{name: _by_torch(getattr(torch, name)) for name in ("exp", "rsqrt", "sqrt", "erf", "tanh", "log", "log1p", "pow")}
)
