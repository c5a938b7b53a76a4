"""The results of operations on fake tensors, from memory where they have been computed before.

A graph of many equal layers has the same few operations on the same few shapes, thousands of times. Torch has a cache
for that, too: it leaves out operations that are not its own, and finding an entry takes as long as a tenth of a
millisecond. What is remembered here is, for an operation and arguments of fixed sizes, the sizes, strides and dtype of
each result, and which argument it is a view of. A result is a new tensor each time: who shares memory with whom is told
by the storages of fake tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping
from typing import Any, Callable, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager

from .graphs import python_dispatcher

MOST_ENTRIES = 20_000  # some hundred bytes each; a model of many shapes has hundreds


class _Result(NamedTuple):
    """A result with memory of its own, or a view of the argument with that number. ``offset``: from where that begins,
    in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int
    view_of: int | None


_Entry = tuple[type, tuple[_Result | None, ...]]  # FakeTensor, tuple or list; its parts
_known: dict[Hashable, _Entry] = {}


def run_fake(mode: FakeTensorMode, op: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``op(*args, **kwargs)`` on fake tensors of a mode, with the decompositions that are written in Python."""
    if op is operator.getitem:
        with mode:
            return op(*args)
    tensors: list[FakeTensor] = []
    key = _key(mode, op, args, kwargs, tensors)
    entry = _known.get(key) if key is not None else None
    if entry is not None:
        kind, parts = entry
        made = [None if part is None else _make(mode, part, tensors) for part in parts]
        return made[0] if kind is FakeTensor else kind(made)
    with mode, python_dispatcher():
        result = op(*args, **kwargs)
    if key is not None and (found := _entry(result, tensors)) is not None:
        if len(_known) >= MOST_ENTRIES:
            _known.clear()
        _known[key] = found
    return result


def forget() -> None:
    """Compute every result again."""
    _known.clear()


def _key(
    mode: FakeTensorMode, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[FakeTensor]
) -> Hashable | None:
    """What the sizes of the results depend on, with the tensors added to a list; None where they depend on more."""
    if not isinstance(op, OpOverload) or op is torch.ops.aten.as_strided.default:  # which counts from elsewhere
        return None
    try:
        part = _Part(mode, tensors)
        parts = [part.of(arg) for arg in args]
        named = [(name, part.of(kwargs[name])) for name in sorted(kwargs)]
    except _Unknown:
        return None
    key = (op, torch.is_grad_enabled(), *parts, *named)
    try:
        hash(key)
    except TypeError:
        return None
    return key


class _Unknown(Exception):
    """An argument that a key can't stand for."""


class _Part(NamedTuple):
    """The part of a key for an argument."""

    mode: FakeTensorMode
    tensors: list[FakeTensor]

    def of(self, arg: Any) -> Hashable:
        if type(arg) is FakeTensor:
            if (
                arg.fake_mode is not self.mode
                or arg._has_symbolic_sizes_strides
                or arg.constant is not None
                or arg.layout is not torch.strided
            ):
                raise _Unknown
            self.tensors.append(arg)
            moved = arg.storage_offset() != 0
            return arg.shape, arg.stride(), arg.dtype, arg.fake_device, moved, arg.requires_grad
        if isinstance(arg, (list, tuple)):
            return type(arg), *(self.of(item) for item in arg)
        if isinstance(arg, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise _Unknown
        return type(arg), arg


def _entry(result: Any, tensors: list[FakeTensor]) -> _Entry | None:
    """How to make this result again; None if that can't be told."""
    if type(result) not in (FakeTensor, tuple, list):
        return None
    memory = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(tensors)}
    parts: list[_Result | None] = []
    results = [result] if type(result) is FakeTensor else result
    for one in results:
        if one is None:
            parts.append(None)
            continue
        if type(one) is not FakeTensor or any(one is tensor for tensor in tensors) or not _is_plain(one):
            return None
        storage = one.untyped_storage()
        view_of, offset = memory.get(storage._cdata), int(one.storage_offset())
        if view_of is not None:
            base = tensors[view_of]
            if base.dtype != one.dtype and (offset or base.storage_offset()):
                return None  # not counted in the same elements
            offset -= int(base.storage_offset())
        part = _Result(tuple(one.shape), one.stride(), one.dtype, one.fake_device, offset, view_of)
        if view_of is None and (offset or storage.nbytes() != _nbytes(part)):
            return None
        parts.append(part)
    own = [one.untyped_storage()._cdata for one, part in zip(results, parts) if part and part.view_of is None]
    return None if len(own) != len(set(own)) else (type(result), tuple(parts))


def _is_plain(tensor: FakeTensor) -> bool:
    return not (
        tensor._has_symbolic_sizes_strides
        or tensor.requires_grad
        or tensor.constant is not None
        or tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
    )


def _nbytes(part: _Result) -> int:
    """Of the memory that ``empty_strided`` takes."""
    if 0 in part.shape:
        return 0
    return (1 + sum((size - 1) * step for size, step in zip(part.shape, part.stride))) * part.dtype.itemsize


def _make(mode: FakeTensorMode, part: _Result, tensors: list[FakeTensor]) -> FakeTensor:
    """As torch makes one from an entry of its own cache."""
    with in_kernel_invocation_manager(mode):
        made = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device="meta")
        if part.view_of is not None:
            base = tensors[part.view_of]
            made.set_(base.untyped_storage(), base.storage_offset() + part.offset, part.shape, part.stride)
    return FakeTensor(mode, made, part.device)
