"""What an operation of ours was given, checked before it is computed with.

``kernels/cpu/tensors.h`` does the same in C++, in the same words. Whatever does not fit is a RuntimeError, which is all
that torch's stable interface makes of an exception in C++. Symbolic sizes, while a graph is traced, are not checked;
whatever a traced graph is called with is.
"""

from __future__ import annotations

from typing import Any, Callable, Collection

import torch
from torch import Tensor

from fp8_compile.torch_internals.graphs import schema_of

FP32 = (torch.float32,)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int64, torch.int32)


class _Any:
    """A size that may be any."""

    def __eq__(self, other: object) -> bool:
        return True

    def __repr__(self) -> str:
        return "any"


ANY: Any = _Any()
ONE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))  # shapes of one number


def check(
    op: str,
    argument: str,
    tensor: Tensor,
    dtypes: Collection[torch.dtype],
    *shapes: tuple[int, ...],
    contiguous: bool = False,
) -> None:
    """Raise an error unless the tensor is on the CPU, of one of the dtypes and of one of the shapes, if any."""
    if (
        tensor.dtype in dtypes
        and tensor.is_cpu
        and (not shapes or tensor.shape in shapes)
        and (not contiguous or tensor.is_contiguous())
    ):
        return
    expected = " or ".join(map(str, dtypes))
    if shapes:
        expected += " of shape " + " or ".join(dict.fromkeys(str(tuple(shape)) for shape in shapes))
    raise RuntimeError(
        f"fp8_compile::{op}: {argument}: expected {expected}{', contiguous,' * contiguous} on cpu, got {tensor.dtype} "
        f"of shape {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
    )


def check_value(op: str, argument: str, value: object, allowed: Collection[Any]) -> None:
    """Raise an error unless the value is one of those."""
    if value not in allowed:
        raise RuntimeError(
            f"fp8_compile::{op}: {argument}: expected one of {', '.join(map(str, allowed))}, got {value}"
        )


def check_at_least(op: str, argument: str, value: int, least: int) -> None:
    """Raise an error unless the number is at least that large."""
    if value < least:
        raise RuntimeError(f"fp8_compile::{op}: {argument}: expected at least {least}, got {value}")


def on_one_device(op: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The function that tells the results' shapes, for tensors that are all on the meta device or all not.

    A call with a single meta tensor goes to that function, and would give a result that nothing has computed.
    """

    def checked(*given: Any, **named: Any) -> Any:
        tensors = [one for one in (*given, *named.values()) if type(one) in (Tensor, torch.nn.Parameter)]
        metas = [one.is_meta for one in tensors]
        if any(metas) and not all(metas):
            schema = schema_of(getattr(torch.ops.fp8_compile, op).default)
            wrong = [argument.name for argument, one in zip(schema.arguments, given) if getattr(one, "is_meta", False)]
            raise RuntimeError(
                f"fp8_compile::{op}: {', '.join(wrong)}: expected all tensors on one device, got some on meta and "
                f"others on {next(one.device for one in tensors if not one.is_meta)}"
            )
        return fake(*given, **named)

    return checked
