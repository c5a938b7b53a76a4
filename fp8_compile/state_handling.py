"""What a training loop asks of the scaling state of its model, and of the code that is compiled with it."""

from __future__ import annotations

import dataclasses
import weakref

from torch import nn


@dataclasses.dataclass
class Handling:
    """As without a training loop, unless its parts change it."""

    cached: bool = False  # FP8 copies of weights are kept and read: weight_cache.py
    held: bool = False  # amaxes wait for the optimizer's step, when those of all ranks are put together


PLAIN = Handling()
_of_module: weakref.WeakKeyDictionary[nn.Module, Handling] = weakref.WeakKeyDictionary()


def handling_of(module: nn.Module | None) -> Handling:
    """How the state of a module is handled."""
    return _of_module.get(module, PLAIN) if module is not None else PLAIN


def handle(model: nn.Module) -> Handling:
    """The handling to change for a model and for modules in it that are compiled by themselves."""
    found = _of_module.get(model) or Handling()
    for module in model.modules():
        _of_module[module] = found
    return found


def handle_no_more(model: nn.Module) -> None:
    for module in model.modules():
        _of_module.pop(module, None)
