"""The update of delayed scales against NumPy: histories, counts, margins, room after a jump, looking, freezing."""

from __future__ import annotations

import math
from typing import Any, Sequence

import fp8_reference
import numpy as np
import pytest
import torch
from delayed_reference import Page, Rule
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_compile.kernels import delayed_scaling as delayed
from fp8_compile.kernels.formats import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, Format

FORMATS = (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)
TABLES = {table.dtype: table for table in fp8_reference.FORMATS}
LARGEST = float(np.finfo(np.float32).max)
f32 = np.float32
formats = st.sampled_from(FORMATS)
amaxes = st.one_of(
    st.sampled_from([0.0, math.inf, math.nan, float(f32(1e-45)), 1e-38, LARGEST, 1.0]), st.floats(0, LARGEST, width=32)
)


def same_bits(found: torch.Tensor, expected: Any) -> bool:
    wanted = np.asarray(expected, found.numpy().dtype)
    return found.shape == wanted.shape and found.numpy().tobytes() == wanted.tobytes()


PLAIN = Rule()


class State:
    """C slots as tensors, and beside them the same slots of a page in NumPy."""

    def __init__(self, count: int, rule: Rule = PLAIN, format: Format = E4M3, margins: Sequence[int] = ()) -> None:
        self.rule, self.format, self.frozen = rule, format, False
        self.history, self.scales = torch.zeros(count, rule.amax_history_len), torch.zeros(2, count)
        self.counts = torch.zeros(delayed.STEADY + 1, count, dtype=torch.int32)
        self.expected = Page(rule, TABLES[format.dtype])
        for slot, margin in enumerate(margins or [0] * count):
            self.expected.slot().margin = margin
            self.counts[delayed.MARGIN, slot] = margin

    @property
    def arguments(self) -> tuple[float, str, int]:
        algorithm = "frozen" if self.frozen else self.rule.amax_algorithm
        return self.format.max, algorithm, self.rule.scale_update_interval

    def look(self, *slots: int) -> None:
        """The slots that are looked at from now on; the others are not."""
        for index, slot in enumerate(self.expected.slots):
            slot.look = index in slots
            self.counts[delayed.LOOK, index] = int(slot.look)

    def step(self, *amaxes: float) -> None:
        """One pass that recorded these, on both sides; all of the state is compared bit for bit."""
        before = [tensor.clone() for tensor in (self.history, self.scales, self.counts)]
        given = (self.history, self.scales, self.counts)
        recorded = torch.tensor(amaxes)
        self.history, self.scales, self.counts = delayed.update(*given, recorded, *self.arguments)
        assert all(torch.equal(tensor, kept) for tensor, kept in zip(given, before)), "arguments are not written"
        for slot, amax in zip(self.expected.slots, amaxes, strict=True):
            if amax != -1:
                slot.record(f32(amax))
        self.expected.frozen = self.frozen
        self.expected.update()
        self.check()

    def check(self) -> None:
        slots = self.expected.slots
        assert same_bits(self.history, np.stack([slot.ring for slot in slots]))
        assert same_bits(self.scales[delayed.QUANT], [slot.quant_scale for slot in slots])
        assert same_bits(self.scales[delayed.DEQUANT], [slot.dequant_scale for slot in slots])
        assert self.counts[: delayed.COUNTERS].T.tolist() == [slot.counters for slot in slots]
        assert self.counts[delayed.MARGIN].tolist() == [slot.margin for slot in slots]
        assert self.counts[delayed.LOOK].tolist() == [slot.look for slot in slots]
        assert self.history.isfinite().all() and self.scales.isfinite().all()

    def counted(self, row: int) -> list[int]:
        return self.counts[row].tolist()

    @property
    def reach(self) -> list[float]:
        """The magnitude that each scale makes the largest value of the format."""
        return (self.format.max / self.scales[delayed.QUANT]).tolist()


ABSENT = delayed.ABSENT
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)
PASSES = st.lists(st.lists(st.one_of(st.just(ABSENT), amaxes), min_size=3, max_size=3), min_size=1, max_size=12)
# Magnitudes so near to each other that some passes saturate a little and some do not.
NEAR = st.lists(
    st.lists(st.one_of(st.just(ABSENT), st.floats(2.0**-12, 2.0**12, width=32)), min_size=3, max_size=3),
    min_size=1, max_size=12,
)  # fmt: skip
ALGORITHMS = st.sampled_from(["max", "most_recent", "p99"])


@settings(max_examples=200)
@given(
    st.one_of(PASSES, NEAR), st.sampled_from([1, 2, 3, 16, 150]), formats,
    st.lists(st.integers(-8, 8), min_size=3, max_size=3), ALGORITHMS, st.integers(1, 4), st.data(),
)  # fmt: skip
def test_updates_are_those_of_slots_kept_one_by_one_in_numpy(
    passes, length, format, margins, algorithm, interval, data
) -> None:
    state = State(3, Rule(algorithm, 0, length, interval), format, margins)
    for recorded in passes:
        state.look(*data.draw(st.sets(st.integers(0, 2), max_size=3)))
        state.frozen = data.draw(st.sampled_from([False, False, False, True]))
        state.step(*recorded)


@given(st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=1, max_size=250), st.sampled_from([4, 16, 200]))
def test_the_99th_percentile_is_numpys_over_what_has_entered(entered, length) -> None:
    history, scales = torch.zeros(1, length), torch.zeros(2, 1)
    counts = torch.zeros(delayed.STEADY + 1, 1, dtype=torch.int32)
    counts[delayed.LOOK] = 1  # no room after an amax that the scale of the percentile before did not hold
    for amax in entered:
        history, scales, counts = delayed.update(history, scales, counts, torch.tensor([amax]), 448.0, "p99")
    percentile = np.percentile(np.array(entered[-length:], np.float64), 99)
    assert 448.0 / scales[0].item() == pytest.approx(percentile, rel=1e-5)


def test_a_pass_in_which_a_slot_was_absent_changes_nothing_of_it() -> None:
    history, scales = torch.rand(4, 5), torch.rand(2, 4)
    counts = torch.full((delayed.STEADY + 1, 4), 7, dtype=torch.int32)
    absent = torch.full((4,), delayed.ABSENT)
    for look in (0, 1):
        counts[delayed.LOOK] = look
        for algorithm in ("max", "most_recent", "p99"):
            after = delayed.update(history, scales.clone(), counts, absent, 448.0, algorithm, 1)
            assert torch.equal(after[0], history) and torch.equal(after[2], counts)
            assert torch.equal(after[1][0], scales[0])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_amax_that_is_not_finite_counts_as_a_pass_and_does_not_enter(bad: float) -> None:
    state = State(1, Rule(amax_history_len=4))
    state.step(8.0)
    history, scales = state.history, state.scales
    state.step(bad)
    assert torch.equal(state.history, history) and torch.equal(state.scales, scales)
    assert state.counts[:, 0].tolist() == [2, 1, *[0] * 8], "nor is it a saturated tensor: it has no amax"


# --- what is counted


@each_format
def test_a_tensor_is_saturated_beyond_what_rounds_to_the_largest_value(format: Format) -> None:
    """Half a step above F is the last number that loses no more than rounding takes anyway."""
    below, largest = TABLES[format.dtype].magnitudes[-2:]
    at_the_limit = f32(largest + (largest - below) / 2)
    state = State(4, format=format)
    state.step(format.max, format.max, format.max, format.max)  # scales of 1
    assert state.scales[delayed.QUANT].tolist() == [1.0] * 4
    state.step(format.max, *(float(x) for x in (np.nextafter(f32(largest), f32(0)), at_the_limit)), ABSENT)
    assert state.counted(delayed.SATURATED) == [0, 0, 0, 0]
    state = State(1, format=format)
    state.step(format.max)
    state.step(float(np.nextafter(at_the_limit, f32(np.inf))))
    assert state.counted(delayed.SATURATED) == [1] and state.counted(delayed.CLIPPED) == [0]


@each_format
def test_a_tensor_is_clipped_if_it_lost_more_than_half_of_its_largest_value(format: Format) -> None:
    state = State(3, Rule("most_recent", 0, 1, 1), format)
    state.look(0, 1, 2)
    state.step(format.max, format.max, format.max)
    state.look()
    state.step(2 * format.max, float(np.nextafter(f32(2 * format.max), f32(np.inf))), 100 * format.max)
    assert state.counted(delayed.SATURATED) == [1, 1, 1] and state.counted(delayed.CLIPPED) == [0, 1, 1]


@pytest.mark.parametrize("format, limit", [(E4M3, 2.0**-8), (E5M2, 2.0**-20)], ids=["e4m3", "e5m2"])
def test_a_tensor_is_small_if_its_scale_reaches_far_beyond_it_and_zeros_are_not(format: Format, limit: float) -> None:
    state = State(4, format=format)
    state.step(*[format.max] * 4)
    edge = format.max * limit
    state.step(edge, float(np.nextafter(f32(edge), f32(0))), 0.0, math.inf)
    assert state.counted(delayed.SMALL) == [0, 1, 0, 0]


def test_a_tensor_without_a_scale_is_none_of_these() -> None:
    state = State(2)
    state.step(0.0, 1e-30)
    state.step(1e30, math.nan)
    assert state.counts[delayed.SATURATED : delayed.MARGIN].tolist() == [[0, 0]] * 5


# --- margins and room


def test_each_slot_has_its_own_margin() -> None:
    state = State(4, margins=(0, 2, -1, 6))
    state.step(3.0, 3.0, 3.0, 3.0)
    assert state.reach == pytest.approx([3.0, 12.0, 1.5, 192.0])


@pytest.mark.parametrize("times, powers", [(1.9, 1), (2.0, 1), (2.01, 2), (4.0, 2), (5.0, 3), (30.0, 5)])
def test_room_is_the_power_of_two_by_which_a_tensor_was_saturated(times: float, powers: int) -> None:
    state = State(2)
    state.step(1.0, 1.0)
    state.step(times, 1.0)
    assert state.reach == pytest.approx([times * 2.0**powers, 2.0**powers])


def test_room_is_the_sum_over_the_saturated_slots_and_each_slot_gets_it() -> None:
    """Each layer lost what the one before it had lost and its own part."""
    state = State(4, margins=(0, 1, 0, 3))
    state.step(1.0, 1.0, 1.0, 1.0)
    state.step(4.0, 4.0, 1.0, 1.0)  # 4 times, and twice what the margin holds
    assert state.counted(delayed.SATURATED) == [1, 1, 0, 0]
    assert state.reach == pytest.approx([4 * 8, 4 * 16, 8, 64])


def test_slots_that_were_not_part_of_the_pass_get_room_as_well() -> None:
    state = State(3)
    state.step(1.0, 1.0, ABSENT)
    state.step(4.0, ABSENT, ABSENT)
    assert state.reach == [4 * 4, 4, math.inf], "a slot that has never seen a tensor has no scale to widen"
    assert state.counted(delayed.RUNS) == [2, 1, 0]


def test_room_is_there_until_the_saturated_slot_was_part_of_two_more_passes() -> None:
    state = State(2)
    state.step(1.0, 1.0)
    state.step(4.0, 1.0)
    assert state.reach == [16, 4]
    state.step(ABSENT, 1.0)  # another graph of the model
    assert state.reach == [16, 4]
    state.step(12.0, ABSENT)
    assert state.reach == pytest.approx([48, 4]), "the other graph has not run since the first one was right"
    state.step(ABSENT, 3.0)
    assert state.reach == pytest.approx([48, 12])
    state.step(12.0, 3.0)
    assert state.reach == pytest.approx([12, 3]) and state.counted(delayed.SATURATED) == [1, 0]


def test_steady_slots_neither_cause_nor_get_room() -> None:
    state = State(2)
    state.counts[delayed.STEADY, 0] = state.expected.slots[0].steady = True
    state.step(1.0, 1.0)
    state.step(4.0, 1.0)
    assert state.reach == [4, 1] and state.counted(delayed.SATURATED) == [1, 0]
    state.step(4.0, 2.0)
    assert state.reach == [4, 4]


@pytest.mark.parametrize("format, most", [(E4M3, 6), (E5M2, 12), (E4M3_FNUZ, 6)], ids=str)
def test_room_is_limited_by_what_the_format_can_spare(format: Format, most: int) -> None:
    state = State(3, format=format)
    state.step(1.0, 1.0, 1.0)
    state.step(2.0**60, 2.0**60, 1.0)
    assert state.reach == [2.0 ** (60 + most), 2.0 ** (60 + most), 2.0**most]
    state = State(2, format=format)
    state.step(1e-30, 1.0)
    state.step(1e30, 1.0)  # amax * quant_scale is Inf
    assert state.counted(delayed.CLIPPED) == [1, 0] and state.reach[1] == 2.0**most


def test_room_does_not_wait_for_the_interval() -> None:
    state = State(2, Rule(scale_update_interval=4))
    state.step(1.0, 1.0)
    state.step(1.0, 0.5)
    assert state.reach == [1, 1]
    state.step(8.0, 0.5)
    assert state.reach == [64, 8]
    state.step(8.0, 0.5)
    state.step(8.0, 0.5)
    assert state.reach == [64, 8], "the fifth pass: room is no longer needed, and stays until the eighth"
    state.step(8.0, 16.0)
    assert state.reach == [8 * 2, 16 * 2], "the sixth, because of the second slot"


# --- looking, and frozen scales


def test_a_slot_that_is_looked_at_is_neither_counted_nor_gives_room_but_gets_its_history_and_its_scale() -> None:
    state = State(2)
    state.step(1.0, 1.0)
    state.look(0)
    state.step(100.0, 1.0)
    state.step(1e-6, 1.0)
    assert state.counts[:, 0].tolist() == [3, 3, 0, 0, 0, 0, 0, 0, 1, 0]
    assert state.reach == pytest.approx([100.0, 1.0])
    state.look()
    state.step(400.0, 1.0)
    assert state.counted(delayed.SATURATED) == [1, 0] and state.reach == pytest.approx([1600.0, 4.0])


def test_what_is_looked_at_has_no_scale_for_the_pass_whatever_the_state_knows() -> None:
    history, scales = torch.zeros(3, 4), torch.tensor([[2.0, 4.0, 0.0], [0.5, 0.25, 0.0]])
    counts, absent = torch.zeros(delayed.STEADY + 1, 3, dtype=torch.int32), torch.full((3,), ABSENT)
    counts[delayed.LOOK, 1] = 1
    for algorithm in ("max", "frozen"):
        room = torch.zeros(1, dtype=torch.int32)
        known = delayed.next_scales(absent, history, scales, counts, room, 448.0, algorithm, 1)
        assert known.tolist() == [[2.0, 0.0, 0.0], [0.5, 0.0, 0.0]]
        kept, in_place = scales.clone(), torch.empty(2, 3)
        state = absent.clone(), history.clone(), kept, counts.clone(), room
        delayed.update_in_place(*state, in_place, 448.0, algorithm, 1)
        assert torch.equal(in_place, known) and torch.equal(kept, scales)


def test_frozen_scales_stay_while_tensors_are_counted() -> None:
    state = State(4, margins=(0, 2, 0, 0))
    state.step(1.0, 1.0, 1.0, ABSENT)
    before, state.frozen = state.scales, True
    state.step(50.0, 1e-6, 1.5, 3.0)
    assert torch.equal(state.scales, before)
    assert state.counts[: delayed.COUNTERS].tolist() == [
        [2, 2, 2, 1], [2, 2, 2, 1], [1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [6, 0, 1, 0], [2, 0, 2, 0],
    ]  # fmt: skip
