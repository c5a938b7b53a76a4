"""Run something between the gradients and ``optimizer.step()``, and something after it."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch.optim import Optimizer


class StepHooks:
    """``prepare()`` once the gradients are there, ``finish()`` when the optimizer has run.

    Without a closure the gradients are there when ``step()`` is called. With one (Lightning always passes one) they are
    there when it has run, inside ``step()``.
    """

    def __init__(self, optimizer: Optimizer, prepare: Callable[[], None], finish: Callable[[], None]) -> None:
        self._prepare, self._finish = prepare, finish
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            with torch.no_grad():
                self._prepare()
            return None

        @functools.wraps(closure)
        def then_prepare() -> Any:
            loss = closure()
            with torch.no_grad():
                self._prepare()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": then_prepare}
        return (args[0], then_prepare, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            self._finish()
