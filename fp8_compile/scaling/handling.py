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


class NoPart:
    """Asks for a handling where no part of a training loop does."""


NO_PART = NoPart()
# By module, and by who asks: two training loops may have a module in common.
_asked: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[object, Handling]] = weakref.WeakKeyDictionary()


def handling_of(module: nn.Module | None) -> Handling:
    """How the state of a module is handled: as anyone asks."""
    asked = list(_asked[module].values()) if module is not None and module in _asked else []
    return Handling(any(one.cached for one in asked), any(one.held for one in asked))


def handle(model: nn.Module, asks: object = NO_PART) -> Handling:
    """What ``asks`` may change for a model and for modules in it that are compiled by themselves."""
    found = _asked.get(model, {}).get(asks) or Handling()
    for module in model.modules():
        _asked.setdefault(module, weakref.WeakKeyDictionary())[asks] = found
    return found
