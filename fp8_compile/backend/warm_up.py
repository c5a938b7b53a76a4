"""The first steps in high precision, while amaxes are recorded.

The FP8 code is compiled at the first call, as without a warm-up. The warm-up itself runs through an uncompiled twin of
the graph: so there is one compilation, at the start, and none when FP8 begins.
"""

from __future__ import annotations

import logging
from typing import Any, Callable

from fp8_compile.scaling.graph_slots import GraphPool
from fp8_compile.torch_internals.autograd import is_recomputation
from fp8_compile.torch_internals.graphs import is_fake

log = logging.getLogger("fp8_compile")


class WarmUp:
    """Run ``warming`` for the first ``steps`` steps, then ``compiled``.

    A step is one of the optimizer where one is attached (``ScalingState.steps``), otherwise a pass over the graph.
    """

    def __init__(
        self, compiled: Callable[..., Any], warming: Callable[..., Any], pool: GraphPool, steps: int
    ) -> None:
        self.compiled, self.warming, self.steps = compiled, warming, steps
        self.state, self.places = pool.state, list(pool.places.values())
        self.passes: int | None = None  # None: not asked yet
        self.epoch = -1

    def __call__(self, *args: Any) -> Any:
        if any(map(is_fake, args)):
            return self.compiled(*args)
        if self.epoch != self.state.epoch:  # the first time, and when a state was loaded or forgotten
            self.epoch, self.passes = self.state.epoch, self.state.passes(self.places)
        assert self.passes is not None
        done = self.passes if self.state.steps is None else self.state.steps
        if done >= self.steps:
            return self.compiled(*args)
        if not is_recomputation():
            self.passes += 1
        return self.warming(*args)
