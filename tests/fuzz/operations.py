"""What a sequence is made of, and how hypothesis draws it: small integers first, so that failures shrink to the usual.

An operation is plain data. ``sequence_run.py`` carries it out.
"""

from __future__ import annotations

import dataclasses
from typing import Union

from hypothesis import strategies as st

ROWS = (16, 4, 64, 1, 33)
MAGNITUDES = (1.0, 1e-1, 10.0, 100.0, 1e-3, 1e3)
KINDS = ("normal", "one token", "outlier", "heavy tails", "zeros")
FACTORS = (1.0, 0.1, 10.0, 1e-2, 1e2)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of tokens: normal, all but one of them zero, one of them 100 times as large, log-normal, or all zero."""

    rows: int = 16
    magnitude: float = 1.0
    kind: str = "normal"


@dataclasses.dataclass(frozen=True)
class Train:
    """Forward and backward of each micro-batch, then a step of the optimizer. ``together``: all forwards come before
    the first backward. ``again``: one more such step on the same data, in which nothing may be saturated any more."""

    batches: tuple[Batch, ...] = (Batch(),)
    entry: int = 0
    input_grad: bool = False
    together: bool = False
    again: bool = False


@dataclasses.dataclass(frozen=True)
class Forward:
    """A forward without backward, under ``no_grad``, ``inference_mode``, or with gradients that no one asks for."""

    batch: Batch = Batch()
    entry: int = 0
    mode: str = "no_grad"


@dataclasses.dataclass(frozen=True)
class Average:
    """Put average weights into the model through ``.data``, evaluate it (or not), put its own weights back."""

    factor: float
    evaluation: Forward | None


@dataclasses.dataclass(frozen=True)
class LoadWeights:
    """``load_state_dict`` of the first weights, times a factor."""

    factor: float


@dataclasses.dataclass(frozen=True)
class RoundTrip:
    """Save the scaling state and load it again."""


@dataclasses.dataclass(frozen=True)
class Save:
    """Keep weights and scaling state for a later ``Resume``."""


@dataclasses.dataclass(frozen=True)
class Resume:
    """Go back to the weights and the scaling state that were last saved; to nothing if there are none."""


@dataclasses.dataclass(frozen=True)
class Look:
    """Read ``stats()``, which does a pending update early."""


@dataclasses.dataclass(frozen=True)
class Attach:
    """``fp8_compile.attach`` to a new optimizer, or ``detach`` if there is one attached."""


@dataclasses.dataclass(frozen=True)
class ForgetCode:
    """``torch.compiler.reset()``: the next call compiles again and finds its state."""


Operation = Union[Train, Forward, Average, LoadWeights, RoundTrip, Save, Resume, Look, Attach, ForgetCode]


def batches() -> st.SearchStrategy[Batch]:
    return st.builds(Batch, st.sampled_from(ROWS), st.sampled_from(MAGNITUDES), st.sampled_from(KINDS))


def operations(entries: int, *, recompiling: bool) -> st.SearchStrategy[Operation]:
    """One operation on a model with that many entries; those that cost a compilation only where it is worth it."""
    entry = st.integers(0, entries - 1)
    train = st.builds(Train, st.lists(batches(), min_size=1, max_size=3).map(tuple), entry, *[st.booleans()] * 3)
    steady = st.builds(Train, st.just((Batch(),)), entry)
    forward = st.builds(Forward, batches(), entry, st.sampled_from(("no_grad", "inference_mode", "grad")))
    factor = st.sampled_from(FACTORS)
    average = st.builds(Average, factor, st.none() | forward)
    rest = st.one_of(average, st.builds(LoadWeights, factor), *map(st.builds, (RoundTrip, Save, Resume, Look)))
    usual = st.one_of(steady, steady, train, train, train, forward, rest)
    return st.one_of(usual, st.builds(Attach), st.builds(ForgetCode)) if recompiling else usual


def sequences(entries: int, *, recompiling: bool = False) -> st.SearchStrategy[list[Operation]]:
    return st.lists(operations(entries, recompiling=recompiling), min_size=3, max_size=10)
