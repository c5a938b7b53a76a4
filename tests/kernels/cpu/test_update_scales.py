"""The C++ of the scales' update against ``delayed_scaling.update``, bit for bit, pass after pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_compile.kernels import delayed_scaling as plain
from fp8_compile.kernels.cpu import update_scales
from fp8_compile.kernels.cpu.operations import registered
from fp8_compile.kernels.formats import E4M3, E4M3_FNUZ, E5M2

FORMATS = (E4M3, E5M2, E4M3_FNUZ)
each_algorithm = pytest.mark.parametrize("algorithm", list(update_scales.ALGORITHMS))
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)
SPECIAL = [plain.ABSENT, 0.0, math.inf, math.nan, 1e-45, 1e-38, torch.finfo(torch.float32).max, 1.0]
amaxes = st.one_of(
    st.sampled_from(SPECIAL),
    st.floats(0, torch.finfo(torch.float32).max, width=32),
    st.floats(2.0**-4, 2.0**4, width=32),
)


class State:
    """C slots with a history of length L, as new but for margins and for slots that are looked at; ``elsewhere``: what
    slots of other graphs need."""

    def __init__(self, slots: int, length: int, elsewhere: int = 0) -> None:
        self.elsewhere, self.room = elsewhere, torch.tensor([elsewhere], dtype=torch.int32)
        self.history, self.scales = torch.zeros(slots, length), torch.zeros(2, slots)
        self.counts = torch.zeros(plain.STEADY + 1, slots, dtype=torch.int32)
        self.counts[plain.MARGIN] = torch.arange(slots) % 9 - 2

    def step(self, recorded: torch.Tensor, *rule: Any, op: Any = plain.update_in_place_op) -> None:
        """Update, and compare all that was written with the reference."""
        expected = plain.update(self.history, self.scales, self.counts, recorded, *rule, elsewhere=self.elsewhere)
        given_amaxes, known = recorded.clone(), torch.full_like(self.scales, math.nan)
        op(given_amaxes, *self.tensors, known, *rule)
        expected = *expected, self.elsewhere + plain.room_for(expected[2])
        for name, found, wanted in zip(("history", "scales", "counts", "room"), self.tensors, expected, strict=True):
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)), name
        looked_at = self.counts[plain.LOOK] != 0
        assert torch.equal(known, torch.where(looked_at, 0.0, self.scales))
        assert (given_amaxes == plain.ABSENT).all(), "ready for the pass that begins"

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.history, self.scales, self.counts, self.room


def some_amaxes(slots: int, generator: torch.Generator) -> torch.Tensor:
    """Magnitudes of many sizes; some slots absent, some zero, some tiny, some Inf, some NaN."""
    found = torch.rand(slots, generator=generator) * 10.0 ** torch.randint(-4, 4, (slots,), generator=generator)
    kind = torch.rand(slots, generator=generator)
    for upper, value in ((0.3, 1e-45), (0.25, math.nan), (0.2, math.inf), (0.15, 0.0), (0.1, plain.ABSENT)):
        found[kind < upper] = value
    return found


def test_there_is_a_compiler_so_that_the_tests_below_compare_two_things() -> None:
    assert registered()


@each_format
@each_algorithm
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("length", [1, 3, 16, 150])
def test_pass_after_pass_is_bit_equal_to_the_reference(length, interval, algorithm, format) -> None:
    generator, state = torch.Generator().manual_seed(length), State(70, length, elsewhere=length % 5)
    for number in range(40):
        state.counts[plain.LOOK] = torch.arange(70) % 7 == number % 14
        if algorithm == "frozen" and number == 0:
            state.step(some_amaxes(70, generator), format.max, "max", 1)  # something to freeze
        state.step(some_amaxes(70, generator), format.max, algorithm, interval)
    assert state.counts[plain.SATURATED].any() and state.counts[plain.SMALL].any(), "all that is counted was met"


@settings(max_examples=150)
@given(
    st.lists(st.lists(amaxes, min_size=3, max_size=3), min_size=1, max_size=12), st.sampled_from([1, 2, 16, 130]),
    st.sampled_from(FORMATS), st.integers(1, 4), st.data(),
)  # fmt: skip
def test_any_sequence_of_amaxes_margins_and_algorithms_is_bit_equal(passes, length, format, interval, data) -> None:
    state = State(3, length)
    state.counts[plain.MARGIN] = torch.tensor(data.draw(st.lists(st.integers(-64, 70), min_size=3, max_size=3)))
    for recorded in passes:
        algorithm = data.draw(st.sampled_from(list(update_scales.ALGORITHMS)))
        state.counts[plain.LOOK] = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=3, max_size=3)))
        state.step(torch.tensor(recorded), format.max, algorithm, interval)
        assert state.scales.isfinite().all()


@each_format
def test_saturation_begins_at_the_same_number(format) -> None:
    """All FP32 numbers around the limits of what is saturated, clipped and small, and around powers of two."""
    limits = plain.limits_of(format.max)
    edges = [limits.saturated_above, limits.small_below, *(2.0**power for power in range(1, 15))]
    near = torch.tensor([format.max * edge for edge in edges]).view(torch.int32)
    for offset in range(-3, 4):
        for amax in (near + offset).view(torch.float32):
            state = State(2, 4)
            state.counts[plain.MARGIN] = 0
            state.step(torch.tensor([format.max, 1.0]), format.max, "max", 1)  # a scale of 1
            state.step(torch.tensor([amax, plain.ABSENT]), format.max, "max", 1)


def test_a_frozen_scale_keeps_its_reciprocal_as_it_was_given() -> None:
    """Whoever freezes a scale may have rounded the reciprocal otherwise."""
    state = State(2, 4)
    state.scales[:] = torch.tensor([[3.0, 7.0], [0.33, 0.14]])
    state.step(torch.tensor([1.0, plain.ABSENT]), 448.0, "frozen", 1)
    assert state.scales[plain.DEQUANT].tolist() == torch.tensor([0.33, 0.14]).tolist()


def test_a_page_without_slots_is_left_alone() -> None:
    State(0, 4).step(torch.empty(0), 448.0, "max", 1)


@each_algorithm
def test_without_a_compiler_the_reference_runs(algorithm: str) -> None:
    generator, state = torch.Generator().manual_seed(3), State(20, 5, elsewhere=3)
    for _ in range(12):
        without = torch.ops.fp8_compile.update_scales__formula
        state.step(some_amaxes(20, generator), 448.0, algorithm, 2, op=without)


def test_the_operation_of_a_cpu_is_the_c_plus_plus(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it writes what autograd saved without a change of version."""
    state, recorded, known = State(4, 3), torch.tensor([1.0, plain.ABSENT, 0.0, 5.0]), torch.empty(2, 4)
    expected = plain.update(*state.tensors[:3], recorded, 448.0, "max", 1)
    monkeypatch.setattr(plain, "update", lambda *arguments: pytest.fail("the reference ran"))
    versions = [tensor._version for tensor in state.tensors]
    plain.update_in_place_op(recorded, *state.tensors, known, 448.0, "max", 1)
    assert all(torch.equal(found, wanted) for found, wanted in zip(state.tensors, expected))
    assert torch.equal(known, state.scales)
    assert [tensor._version for tensor in state.tensors] == versions


@pytest.mark.parametrize("name", ["record_amaxes_", "accumulate_amaxes_"])
def test_amaxes_are_recorded_as_the_formula_does(name: str) -> None:
    """Absent slots, two records of one slot, a NaN that stays, and nothing at all."""
    values = [0.0, 1e-45, 3.0, math.inf, math.nan, 2.0, 7.0]
    recorded = [torch.full(shape, value) for shape, value in zip(((), (1,), (1, 1)) * 3, values)]
    for rows in ([0, 1, 2, 3, 4, 5, 6], [0, 0, 2, 2, 4, 4, 0], []):
        start = torch.tensor([plain.ABSENT, 5.0, 1.0, math.nan, 0.0, plain.ABSENT, math.inf, 4.0])
        found, expected = start.clone(), start.clone()
        for op, table in ((name, found), (f"{name}_formula", expected)):
            getattr(torch.ops.fp8_compile, op)(table, recorded[: len(rows)], rows)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32)), rows
        assert found._version == 0, "autograd may have saved it"
