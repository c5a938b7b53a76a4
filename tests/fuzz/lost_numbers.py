"""What the engine says about lost numbers, read without changing what it does next."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import Iterator

from torch import nn

from fp8_compile.passes.graph.slot import FIELDS
from fp8_compile.scaling.find_state import states_within
from fp8_compile.scaling.state import ScalingState

# This warning repeats what was counted, maybe in earlier calls. The counters say which call it was.
REPEATED = "delayed scaling lost numbers"


class Warnings(logging.Handler):
    """Keeps the warnings of the engine's logger while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not (message := record.getMessage()).startswith(REPEATED):
            self.messages.append(message)

    def __enter__(self) -> Warnings:
        logging.getLogger("fp8_compile").addHandler(self)
        return self

    def __exit__(self, *exception: object) -> None:
        logging.getLogger("fp8_compile").removeHandler(self)


def counted(model: nn.Module) -> Counter[str]:
    """How often each slot of a model was saturated or too small for its scale, the last pass included."""
    found: Counter[str] = Counter()
    for name, state in states_within(model).items():
        with _as_it_was(state):
            for row in state.stats():
                slot = ".".join(filter(None, (name, row.slot)))
                found[f"{slot} saturated"], found[f"{slot} small"] = row.saturated, row.small
    return found


@contextlib.contextmanager
def _as_it_was(state: ScalingState) -> Iterator[None]:
    """``stats()`` does the update that the next pass would begin with. A sequence in which someone looks after every
    call would never see that update done in compiled code, so it is undone."""
    tensors = [getattr(page, field) for page in state.tables for field in FIELDS]
    kept = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, before in zip(tensors, kept):
            tensor.data.copy_(before)
