"""The code of a training graph without state, which notes for which weights it runs."""

from __future__ import annotations

import weakref
from typing import Any, Callable, Sequence

from fp8_compile.passes.graph.weight_grid import WeightGrid
from fp8_compile.scaling.training_grids import note_grids
from fp8_compile.torch_internals.graphs import is_fake

from .runner import Code


class NotedCode:
    """Call it as the compiled code. What it does to weights is noted when it first runs for them."""

    def __init__(self, compiled: Code, grids: Sequence[WeightGrid]) -> None:
        self.compiled, self.grids = compiled, grids
        self._arguments = [grid.argument for grid in grids]
        self._seen: dict[tuple[int, ...], list[weakref.ref[Any]]] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple([id(args[index]) for index in self._arguments])
        if key not in self._seen:
            self._note(key, args)
        return self.compiled(*args)

    def _note(self, key: tuple[int, ...], args: Sequence[Any]) -> None:
        weights = [args[index] for index in self._arguments]
        if not any(map(is_fake, weights)):
            note_grids(self.grids, args)
            self._seen[key] = [weakref.ref(weight, _forget(self, key)) for weight in weights]


def _forget(code: NotedCode, key: tuple[int, ...]) -> Callable[[Any], None]:
    """Another tensor may get the address of one that is gone."""
    mine = weakref.ref(code)

    def forget(_: Any) -> None:
        if (found := mine()) is not None:
            found._seen.pop(key, None)

    return forget
