"""update_scales is bit-equal to delayed_scaling.update for every algorithm, and leaves amaxes ready for the next.

``BLOCK`` slots are done at a time: 1024 for histories of length 1, 64 for those of length 16.
"""

from __future__ import annotations

import functools

import pytest
import torch
from interpreted import check_same, interpreted
from stub_driver import stub_driver

from fp8_compile.kernels.delayed_scaling import LOOK, MARGIN, SATURATED, SMALL, STEADY, room_for
from fp8_compile.kernels.gpu import tile, update_scales

each_algorithm = pytest.mark.parametrize("algorithm", list(update_scales.ALGORITHMS))


class State:
    """C slots with a history of length L, as new; each has a margin, either the one given or one of its own."""

    def __init__(self, slots: int, length: int, margin: int | None = 0, elsewhere: int = 0) -> None:
        self.elsewhere, self.room = elsewhere, torch.tensor([elsewhere], dtype=torch.int32)
        self.history = torch.zeros(slots, length)
        self.scales = torch.zeros(2, slots)
        self.counts = torch.zeros(STEADY + 1, slots, dtype=torch.int32)
        self.counts[MARGIN] = torch.arange(slots) % 9 - 2 if margin is None else margin

    def step(self, amaxes: torch.Tensor, *arguments) -> None:
        """Update, and compare with the reference."""
        state = (self.history, self.scales, self.counts)
        expected = update_scales.reference(*state, amaxes, *arguments, elsewhere=self.elsewhere)
        recorded = amaxes.clone()
        with interpreted(update_scales, tile):
            known = update_scales.update_scales(*state, recorded, *arguments, room=self.room)
        expected = *expected, self.elsewhere + room_for(expected[2])
        for actual, wanted in zip((*state, self.room), expected, strict=True):
            check_same(actual, wanted)
        check_same(known, torch.where(self.counts[LOOK] == 0, self.scales, 0.0))
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
    state = State(slots=5 if algorithm == "p99" else 70, length=length, margin=None, elsewhere=length % 5)
    for number in range(4 if algorithm == "p99" else 2 * length + 3):
        state.counts[LOOK] = torch.arange(len(state.history)) % 7 == number % 14
        state.step(some_amaxes(len(state.history), generator), 448.0, "max" if number == 0 else algorithm, 2)


@each_algorithm
@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_room_comes_from_and_goes_to_slots_of_every_block(algorithm: str, largest: float) -> None:
    slots = 5 if algorithm == "p99" else 150  # three blocks of 64 but for p99, see above
    for saturated in ([0], [slots - 1], [0, slots // 2, slots - 1]):
        state = State(slots, length=16, margin=None, elsewhere=2)
        state.step(torch.ones(slots), largest, "max", 1)
        before = state.scales.clone()
        amaxes = torch.full((slots,), tile.NOTHING)
        amaxes[1] = 1e-9
        amaxes[saturated] = 300.0
        state.step(amaxes, largest, algorithm, 4)
        changed = state.scales[0] != before[0]
        assert changed.sum() == (0 if algorithm == "frozen" else slots), "those that were not part of the pass too"
        assert state.counts[SATURATED].nonzero().flatten().tolist() == saturated
        assert state.counts[SMALL].nonzero().flatten().tolist() == [1]


def test_the_percentile_of_more_slots_than_a_block_holds() -> None:
    state = State(slots=3, length=1024)  # one slot at a time
    state.history[:, :300] = torch.rand(3, 300)
    state.counts[:2] = 300
    state.step(torch.tensor([0.5, 2.0, tile.NOTHING]), 448.0, "p99", 1)


@each_algorithm
@pytest.mark.parametrize("margin", [-64, -3, 0, 70])
def test_scales_stay_finite_at_the_ends_of_fp32(algorithm: str, margin: int) -> None:
    state = State(slots=6, length=2, margin=margin)
    for _ in range(2):
        state.step(torch.tensor([1e-45, 1e-38, 3.4e38, 1e30, 0.0, torch.inf]), 57344.0, algorithm, 1)
    assert state.scales.isfinite().all()


def test_ninety_ninth_percentile_interpolates_below_the_top_of_a_long_history() -> None:
    state = State(slots=2, length=128)
    state.history[:, :120] = torch.arange(1, 121) / 7.0
    state.counts[:2] = 120
    state.step(torch.tensor([50.0, tile.NOTHING]), 448.0, "p99", 1)
    assert 448.0 / 50.0 < state.scales[0, 0] and state.scales[0, 1] == 0


def test_between_intervals_the_history_moves_and_the_scale_stays() -> None:
    state = State(slots=1, length=4)
    scales = []
    for amax in (8.0, 4.0, 2.0, 1.0, 0.5, 0.25):
        state.step(torch.tensor([amax]), 448.0, "max", 3)
        scales.append(state.scales[0, 0].item())
    assert scales == [56.0] * 5 + [224.0], "the first amax gives a scale at once, then every third pass"
    assert state.history.tolist() == [[0.5, 0.25, 2.0, 1.0]]


def test_a_saturation_does_not_wait_for_the_interval() -> None:
    state = State(slots=2, length=4)
    for amax in (1.0, 1.0, 1.0, 8.0):
        state.step(torch.tensor([amax, 1.0]), 448.0, "max", 3)
    assert state.scales[0].tolist() == [448.0 / 64, 448.0 / 8]


def test_a_launch_is_prepared_once_for_states_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, run = update_scales.update_scales_kernel, type(update_scales.update_scales_kernel).run
    by_triton = []
    monkeypatch.setattr(type(kernel), "run", lambda *given, **named: by_triton.append(1) or run(*given, **named))
    monkeypatch.setattr(update_scales, "_prepared", functools.cache(update_scales._prepared.__wrapped__))
    states = [State(slots, 16) for slots in (32, 32, 48, 32)]
    with stub_driver(kernel) as launched:
        for state in states:
            tensors = (state.history, state.scales, state.counts, torch.zeros(len(state.history)))
            known = update_scales.update_scales(*tensors, 448.0, "max", 1)
            _, scalars = update_scales.launch_arguments(*state.history.shape, 448.0, "max", 1)
            given = dict(zip(kernel.arg_names, launched[-1].arguments, strict=True))
            assert given["history_ptr"] is state.history and given["known_ptr"] is known
            assert {name: given[name] for name in scalars} == scalars
    assert len(launched) == 4 and len(by_triton) == 2, "one for each size"


def test_addresses_that_16_does_not_divide_are_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_scales, "_prepared", functools.cache(update_scales._prepared.__wrapped__))
    state, amaxes = State(32, 16), torch.zeros(33)
    with stub_driver(update_scales.update_scales_kernel) as launched:
        for recorded in (amaxes[:32], amaxes[1:]):
            update_scales.update_scales(state.history, state.scales, state.counts, recorded, 448.0, "max", 1)
    assert len(launched) == 2 and update_scales._prepared.cache_info().currsize == 2


def test_the_operation_on_a_gpu_is_one_launch() -> None:
    """Its implementation is found by name when it is first called, which takes a GPU."""
    op = "fp8_compile::update_scales_"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")
    module, _, function = "fp8_compile.kernels.gpu.update_scales:update_in_place".partition(":")
    assert update_scales.__name__ == module and hasattr(update_scales, function)
