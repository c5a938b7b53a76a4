"""Run something between the gradients and ``optimizer.step()``, and something after it, whether it succeeds or not."""

from __future__ import annotations

import functools
import types
from typing import Any, Callable

import torch
from torch.optim import Optimizer


class StepHooks:
    """``prepare()`` once the gradients are there, ``finish()`` when the optimizer has run, ``fail()`` if it raised.

    An optimizer may call its closure several times in a step (LBFGS): ``again()`` comes before each call but the first.

    Without a closure the gradients are there when ``step()`` is called. With one (Lightning always passes one) they are
    there when it has run, inside ``step()``. Torch calls the hooks of a subclass that calls ``super().step()`` twice:
    the outer call counts.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        prepare: Callable[[], None],
        finish: Callable[[], None],
        fail: Callable[[], None],
        again: Callable[[], None] = lambda: None,
    ) -> None:
        self._prepare, self._finish, self._again = prepare, finish, again
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        self._handles.append(OnFailure(optimizer, "step", fail, self._begin))
        self._depth = 0  # calls of step() that are under way

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self) -> None:
        self._depth = 0  # a step that failed has left more

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            with torch.no_grad():
                self._prepare()
            return None

        evaluations = 0

        @functools.wraps(closure)
        def then_prepare() -> Any:
            nonlocal evaluations
            if evaluations:
                with torch.no_grad():
                    self._again()
            loss = closure()
            evaluations += 1
            with torch.no_grad():
                self._prepare()
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": then_prepare}
        return (args[0], then_prepare, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            with torch.no_grad():
                self._finish()


class OnFailure:
    """Calls ``fail()`` where a method of an optimizer raises, be it the optimizer itself, a closure or another hook;
    and ``begin()`` at each call from outside.

    Torch has no hook for that. The method is replaced on the instance, by a bound one, as schedulers do with ``step``
    and as they expect it.
    """

    def __init__(
        self, optimizer: Optimizer, name: str, fail: Callable[[], None], begin: Callable[[], None] = lambda: None
    ) -> None:
        self._optimizer, self._name, self._on = optimizer, name, True
        self._begin, self._fail = begin, fail
        self._replaced = optimizer.__dict__.get(name)
        self._guarded = self._guard(getattr(optimizer, name))
        setattr(optimizer, name, self._guarded)

    def remove(self) -> None:
        self._on = False  # something may have been put around it in the meantime
        if self._optimizer.__dict__.get(self._name) is self._guarded:
            delattr(self._optimizer, self._name)
            if self._replaced is not None:
                setattr(self._optimizer, self._name, self._replaced)

    def _guard(self, method: Callable[..., Any]) -> types.MethodType:
        @functools.wraps(method)
        def guarded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._begin()
            try:
                return method(*args, **kwargs)
            except BaseException:  # an interrupt, too
                if self._on:
                    with torch.no_grad():
                        self._fail()
                raise

        return types.MethodType(guarded, self._optimizer)
