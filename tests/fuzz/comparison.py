"""How far a call of the engine is from FP64, beside how far stateless FP8 is from it; tensor by tensor, in decibels.

A *gap* is what the engine loses: the simulation's signal-to-noise ratio minus the engine's. Rounding falls differently
under two equally good scales, and for few tokens, or a gradient that almost cancels, that luck alone is worth decibels.
So a gap is measured from the bad luck of the simulation: from the mean of several draws with scales moved at random
(``StatelessFp8``), minus ``LUCK`` of their standard deviations. Large tensors have hardly any luck (0.1 dB); one token
may have 1.5 dB of it. Draws are made only where a first simulation is ahead by more than ``ALLOWED_DB``, and not where
the engine has said that numbers were lost: of what is excused, the size does not matter.

Nothing is asked of tensors that stateless FP8 itself gets no better than ``LEAST_DB``: their noise is a good part of
the signal, and its ratio to another such noise says nothing about scales.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Callable, Mapping

import torch
from torch import Tensor

ALLOWED_DB = 2.0  # DESIGN.md: never worse than tensorwise by more than that without a word
LEAST_DB = 8.0
MOST_DB = 60.0  # what a tensor that meets no FP8 has in FP32 and more; no one counts beyond
NOT_FP8 = 1e-5  # an error relative to the result: FP32 has less, and FP8 not even by luck
DRAWS = 16
LUCK = 4.0  # a run compares 100,000 tensors: 3 standard deviations would be there by chance a hundred times

Tensors = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Gap:
    """What one tensor of one call lost, beyond what stateless FP8 loses."""

    tensor: str
    engine_db: float
    simulated_db: float  # with bad luck

    @property
    def size(self) -> float:
        return self.simulated_db - self.engine_db

    def __str__(self) -> str:
        return f"{self.tensor}: {self.engine_db:.1f} dB, stateless FP8 {self.simulated_db:.1f} dB"


def sqnr_db(found: Tensor, exact: Tensor) -> float:
    """Signal to quantization noise, at most ``MOST_DB``; of a result that is not finite, minus infinity.

    Where the exact result is zero there is nothing to compare with: noise may wake a unit that ReLU has switched off.
    """
    signal, noise = exact.double().norm().item(), (found.double() - exact.double()).norm().item()
    if not math.isfinite(noise):
        return -math.inf
    if signal == 0 or noise <= signal * 10 ** (-MOST_DB / 20):
        return MOST_DB
    return 20 * math.log10(signal / noise)


def find_gaps(
    engine: Tensors, exact: Tensors, simulate: Callable[[torch.Generator | None], Tensors], *, excused: bool
) -> list[Gap]:
    """The gap of each tensor that can be compared. ``simulate(luck)`` runs the call in stateless FP8."""
    if engine.keys() != exact.keys():
        raise AssertionError(f"the engine gave {sorted(engine)}, the reference {sorted(exact)}")
    plain = _all_db(simulate(None), exact)
    found = {name: sqnr_db(engine[name], exact[name]) for name, db in plain.items() if db >= LEAST_DB}
    error = (engine["output"].double() - exact["output"]).norm()
    if plain["output"] < MOST_DB and error <= NOT_FP8 * exact["output"].norm():
        raise AssertionError("the output is as good as FP32's: it was not computed in FP8")
    if excused or all(plain[name] - db <= ALLOWED_DB for name, db in found.items()):
        return [Gap(name, db, plain[name]) for name, db in found.items()]
    draws = [_all_db(simulate(torch.Generator().manual_seed(seed)), exact) for seed in range(DRAWS)]
    bad_luck = {name: _with_bad_luck([draw[name] for draw in draws]) for name in found}
    return [Gap(name, db, min(plain[name], bad_luck[name])) for name, db in found.items()]


def _with_bad_luck(decibels: list[float]) -> float:
    return statistics.mean(decibels) - LUCK * statistics.stdev(decibels)


def _all_db(found: Tensors, exact: Tensors) -> dict[str, float]:
    return {name: sqnr_db(found[name], exact[name]) for name in exact}
