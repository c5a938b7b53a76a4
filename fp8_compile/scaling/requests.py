"""What training loops ask of the scaling state of a model, and of the code that is compiled with it."""

from __future__ import annotations

import dataclasses
import weakref


class Changes:
    """How often it has changed what is asked of any module. Guards look at this number before they look closer."""

    count = 0

    @classmethod
    def note(cls) -> None:
        cls.count += 1


@dataclasses.dataclass
class Request:
    """What one part of a training loop asks for."""

    cached: bool = False  # FP8 copies of weights are kept and read: weight_cache.py
    held: bool = False  # amaxes wait for the optimizer's step, when those of all ranks are put together

    def __setattr__(self, name: str, value: bool) -> None:
        super().__setattr__(name, value)
        Changes.note()


class Requests:
    """The requests for one module. Two training loops may have a module in common: what any of them asks for is done.
    A request ends with the object that made it."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[object, Request] = weakref.WeakKeyDictionary()

    def of(self, asker: object) -> Request | None:
        return self._of.get(asker)

    def add(self, asker: object, request: Request) -> None:
        self._of[asker] = request

    @property
    def cached(self) -> bool:
        return bool(self._of) and any(request.cached for request in self._of.values())

    @property
    def held(self) -> bool:
        return bool(self._of) and any(request.held for request in self._of.values())
