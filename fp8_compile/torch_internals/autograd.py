"""Version counters, recomputation inside a backward, and operations on many tensors at once."""

from __future__ import annotations

import contextlib
from typing import Iterable, Sequence

import torch
from torch import Tensor


def version(tensor: Tensor) -> int:
    """How often a tensor was written in place, as far as autograd knows; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def are_as_seen(tensors: Sequence[Tensor], seen: Iterable[tuple[int, int, int]]) -> bool:
    """True if tensors have the version and the address that they had; ``seen``: which one, version, address. This is
    asked before every run of a graph, so it is a loop and nothing else."""
    for index, version, address in seen:
        tensor = tensors[index]
        if tensor._version != version or tensor.data_ptr() != address:
            return False
    return True


def keep_versions(tensors: Iterable[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Have autograd not learn of what is written to these tensors meanwhile."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def is_recomputation() -> bool:
    """True while a checkpoint computes a forward again, inside a backward, under hooks that catch what it saves."""
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def copy_all(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copy many tensors in as few launches as possible."""
    if to:
        torch._foreach_copy_(list(to), list(source))


def largest_magnitudes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude of each tensor, NaN where it has one."""
    return list(torch._foreach_norm(list(tensors), float("inf")))


def accelerator() -> str:
    """The type of the device that this machine computes on: "cpu" where it has no other."""
    found = torch.accelerator.current_accelerator(check_available=True)  # a CUDA build names "cuda" without a GPU, too
    return found.type if found is not None else "cpu"
