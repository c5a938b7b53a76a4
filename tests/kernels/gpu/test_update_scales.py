"""update_scales is bit-equal to delayed_scaling.update for every algorithm, and leaves amaxes ready for the next."""

from __future__ import annotations

import pytest
import torch
from interpreted import check_same, interpreted

from fp8_compile.kernels.gpu import tile, update_scales

each_algorithm = pytest.mark.parametrize("algorithm", list(update_scales.ALGORITHMS))


class State:
    """C slots with a history of length L, as new."""

    def __init__(self, slots: int, length: int) -> None:
        self.history = torch.zeros(slots, length)
        self.scales = torch.zeros(2, slots)
        self.counts = torch.zeros(2, slots, dtype=torch.int32)

    def step(self, amaxes: torch.Tensor, *arguments) -> None:
        """Update, and compare with the reference."""
        state = (self.history, self.scales, self.counts)
        expected = update_scales.reference(*state, amaxes, *arguments)
        recorded = amaxes.clone()
        with interpreted(update_scales, tile):
            known = update_scales.update_scales(*state, recorded, *arguments)
        for actual, wanted in zip(state, expected):
            check_same(actual, wanted)
        check_same(known, self.scales)
        assert (recorded == tile.NOTHING).all()


def some_amaxes(slots: int, generator: torch.Generator) -> torch.Tensor:
    """Magnitudes of many sizes; some slots absent, some zero, some Inf, some NaN."""
    amaxes = torch.rand(slots, generator=generator) * 10.0 ** torch.randint(-4, 4, (slots,), generator=generator)
    kind = torch.rand(slots, generator=generator)
    for upper, value in ((0.4, torch.nan), (0.3, torch.inf), (0.25, 0.0), (0.2, tile.NOTHING)):
        amaxes[kind < upper] = value
    return amaxes


@each_algorithm
@pytest.mark.parametrize("length", [1, 3, 16])
def test_pass_after_pass_is_bit_equal_to_the_reference(algorithm: str, length: int, generator) -> None:
    # p99 sorts, which takes the interpreter a second a pass.
    state = State(slots=5 if algorithm == "p99" else 70, length=length)
    for _ in range(4 if algorithm == "p99" else 2 * length + 3):
        state.step(some_amaxes(len(state.history), generator), 448.0, 1, algorithm, 2)


@each_algorithm
@pytest.mark.parametrize("margin", [-3, 0, 120])
def test_scales_stay_finite_at_the_ends_of_fp32(algorithm: str, margin: int) -> None:
    state = State(slots=6, length=2)
    for _ in range(2):
        state.step(torch.tensor([1e-45, 1e-38, 3.4e38, 1e30, 0.0, torch.inf]), 57344.0, margin, algorithm, 1)
    assert state.scales.isfinite().all()


def test_ninety_ninth_percentile_interpolates_below_the_top_of_a_long_history() -> None:
    state = State(slots=2, length=128)
    state.history[:, :120] = torch.arange(1, 121) / 7.0
    state.counts += 120
    state.step(torch.tensor([50.0, tile.NOTHING]), 448.0, 0, "p99", 1)
    assert 448.0 / 50.0 < state.scales[0, 0] and state.scales[0, 1] == 0


def test_between_intervals_the_history_moves_and_the_scale_stays() -> None:
    state = State(slots=1, length=4)
    scales = []
    for amax in (1.0, 2.0, 4.0, 8.0):
        state.step(torch.tensor([amax]), 448.0, 0, "max", 3)
        scales.append(state.scales[0, 0].item())
    assert scales == [448.0, 448.0, 112.0, 112.0], "the first amax gives a scale at once, then every third pass"
    assert state.history.tolist() == [[1.0, 2.0, 4.0, 8.0]]
