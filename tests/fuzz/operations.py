"""What a sequence is made of, and how hypothesis draws it: small integers first, so that failures shrink to the usual.

An operation is plain data. ``sequence_run.py`` carries it out.
"""

from __future__ import annotations

import dataclasses

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
class Steady:
    """A few steps as usual: what most calls of most runs are, and what leaves a history behind."""

    entries: tuple[int, ...] = (0,)


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


Operation = (
    Train | Steady | Forward | Average | LoadWeights | RoundTrip | Save | Resume | Look | Attach | ForgetCode
)


def batches() -> st.SearchStrategy[Batch]:
    return st.builds(Batch, st.sampled_from(ROWS), st.sampled_from(MAGNITUDES), st.sampled_from(KINDS))


def operations(entries: int, *, recompiling: bool) -> st.SearchStrategy[Operation]:
    """One operation on a model with that many entries; those that cost a compilation only where it is worth it."""
    entry, factor = st.integers(0, entries - 1), st.sampled_from(FACTORS)
    forward = st.builds(Forward, batches(), entry, st.sampled_from(("no_grad", "inference_mode", "grad")))
    one, several = batches().map(lambda batch: (batch,)), st.lists(batches(), min_size=2, max_size=3).map(tuple)
    shares = {
        st.builds(Steady, st.lists(entry, min_size=1, max_size=5).map(tuple)): 4,
        st.builds(Train, one, entry, *[st.booleans()] * 3): 4,
        st.builds(Train, several, entry, *[st.booleans()] * 3): 2,
        forward: 2,
        st.builds(Average, factor, st.none() | forward): 1,
        st.builds(LoadWeights, factor): 1,
        st.sampled_from((RoundTrip(), Save(), Resume(), Look())): 2,
        st.sampled_from((Attach(), ForgetCode())): 2 if recompiling else 0,
    }
    return st.sampled_from([strategy for strategy, share in shares.items() for _ in range(share)]).flatmap(_itself)


def _itself(strategy: st.SearchStrategy[Operation]) -> st.SearchStrategy[Operation]:
    return strategy  # one_of would take strategies apart that are made of several, and forget their shares


def sequences(entries: int, *, recompiling: bool = False) -> st.SearchStrategy[list[Operation]]:
    return st.lists(operations(entries, recompiling=recompiling), min_size=3, max_size=8)
