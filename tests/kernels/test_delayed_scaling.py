"""The formulas of delayed scaling against NumPy: what a scale is, what enters a history, what is cast and counted."""

from __future__ import annotations

import math
from typing import Any

import fp8_reference
import numpy as np
import pytest
import torch
from absent_gpu import absent_gpu
from called_ops import CalledOps
from compile_kernels import compile_kernels
from delayed_reference import scale_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fp8_compile.kernels import delayed_scaling as delayed
from fp8_compile.kernels.formats import E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ

FORMATS = (E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ)
TABLES = {table.dtype: table for table in fp8_reference.FORMATS}
LARGEST = np.finfo(np.float32).max
DENORMAL = float(np.float32(1e-45))
SPECIAL = [0.0, math.inf, math.nan, DENORMAL, 1e-38, float(LARGEST), 1.0]
f32 = np.float32

amaxes = st.one_of(st.sampled_from(SPECIAL), st.floats(0, float(LARGEST), width=32))
usable = st.one_of(
    st.sampled_from([value for value in SPECIAL if 0 < value < math.inf]),
    st.floats(DENORMAL, float(LARGEST), width=32, allow_subnormal=True),
)
exponents = st.integers(-126, 127)  # of FP32's normal powers of two
formats = st.sampled_from(FORMATS)


def same_bits(found: torch.Tensor, expected: Any) -> bool:
    wanted = np.asarray(expected, found.numpy().dtype)
    return found.shape == wanted.shape and found.numpy().tobytes() == wanted.tobytes()


# --- scale_of and first_scale


@given(usable, formats, exponents)
def test_a_scale_is_the_formula_in_fp32_and_always_finite_and_above_zero(amax, format, exponent) -> None:
    scale = delayed.scale_of(torch.tensor(amax), format.max, torch.tensor(exponent, dtype=torch.int32))
    assert same_bits(scale, scale_of(f32(amax), TABLES[format.dtype], exponent))
    assert 0 < scale.item() < math.inf


@given(usable, formats)
def test_without_an_exponent_a_scale_is_that_of_an_exponent_of_zero(amax, format) -> None:
    scale = delayed.scale_of(torch.tensor(amax), format.max)
    assert same_bits(scale, scale_of(f32(amax), TABLES[format.dtype]))


@given(usable, st.sampled_from((E4M3, E5M2)))
def test_an_amax_scaled_by_its_own_scale_reaches_the_largest_value_unless_the_scale_is_capped(amax, format) -> None:
    scale = delayed.scale_of(torch.tensor(amax), format.max)
    reached = float(amax) * scale.item()
    assert reached == pytest.approx(format.max, rel=1e-6) if scale < LARGEST else reached < format.max * (1 + 1e-6)


@pytest.mark.parametrize("margin", [-3, -1, 1, 5])
def test_a_margin_is_that_many_powers_of_two_of_room(margin: int) -> None:
    amax = torch.tensor(3.7)
    plain, with_room = (delayed.scale_of(amax, 448.0, torch.tensor(m, dtype=torch.int32)) for m in (0, margin))
    assert with_room.item() == plain.item() / 2.0**margin


def test_powers_of_two_are_exact() -> None:
    exponents = torch.arange(-126, 128, dtype=torch.int32)
    assert delayed.power_of_two(exponents).tolist() == [2.0**exponent for exponent in range(-126, 128)]


@given(amaxes, st.sampled_from([0.0, 0.25, 7.0]), formats)
def test_a_first_scale_is_the_tensors_own_without_a_margin_and_only_where_there_is_none(amax, known, format) -> None:
    found = delayed.first_scale(torch.tensor(known), torch.tensor(amax), format.max)
    if known > 0:
        expected = f32(known)
    elif 0 < amax < math.inf:
        expected = scale_of(f32(amax), TABLES[format.dtype])
    else:
        expected = f32(1)
    assert same_bits(found, expected)


# --- cast_delayed


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.sampled_from([0.0, -0.0, 1e-45, -1e-45]), st.floats(width=32)), min_size=1, max_size=20),
    st.floats(2.0**-100, 2.0**100, width=32),
    formats,
)
def test_a_cast_rounds_saturates_and_turns_inf_into_nan_as_the_table_does(values, scale, format) -> None:
    x = torch.tensor(values)[None]
    q = delayed.cast_delayed(x, torch.tensor([[scale]]), format.dtype)
    with np.errstate(all="ignore"):
        scaled = np.clip(x.numpy() * f32(scale), -f32(format.max), f32(format.max))
    scaled[~np.isfinite(x.numpy())] = np.nan
    expected = TABLES[format.dtype].encode(scaled)
    found, special = fp8_reference.codes_of(q), np.isnan(scaled)
    assert q.dtype == format.dtype and q.shape == x.shape
    assert (found[~special] == expected[~special]).all()
    assert q.float().isnan().numpy()[special].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_within_range_a_cast_is_torchs_own_of_the_scaled_value(format, dtype) -> None:
    x = (torch.randn(33, 7) * torch.exp(2 * torch.randn(33, 7))).to(dtype)
    scale = torch.tensor([[format.max / 2 / x.abs().max().item()]])
    q = delayed.cast_delayed(x, scale, format.dtype)
    assert torch.equal(q.view(torch.uint8), (x.float() * scale).to(format.dtype).view(torch.uint8))
    assert q.float().abs().max() > 0


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_what_is_beyond_the_range_becomes_the_largest_value_not_nan(format) -> None:
    x = torch.tensor([[1.0, -1.0, 3e38, -3e38]])
    q = delayed.cast_delayed(x, torch.tensor([[1e5]]), format.dtype).float()
    assert q.tolist() == [[format.max, -format.max, format.max, -format.max]]


def test_a_cast_of_a_transposed_or_sliced_matrix_lies_row_by_row() -> None:
    base, scale = torch.randn(12, 10), torch.full((1, 1), 3.0)
    for x in (base.t(), base[::2], base[:, 3:7], base[:1].expand(5, 10)):
        q = delayed.cast_delayed(x, scale, E4M3.dtype)
        assert q.is_contiguous() and torch.equal(q.float(), (x * 3).to(E4M3.dtype).float())


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
def test_a_cast_of_nothing_is_nothing(shape) -> None:
    q = delayed.cast_delayed(torch.empty(shape), torch.ones(1, 1), E4M3.dtype)
    assert q.shape == shape and q.dtype == E4M3.dtype


# --- the operations


def test_the_ops_in_place_do_what_the_functional_ones_do() -> None:
    generator = torch.Generator().manual_seed(1)
    history, counts = torch.zeros(6, 3), torch.zeros(delayed.STEADY + 1, 6, dtype=torch.int32)
    counts[delayed.MARGIN] = torch.arange(-2, 4)
    counts[delayed.LOOK, 2] = 1
    scales, pending = torch.zeros(2, 6), torch.full((6,), delayed.ABSENT)
    room = torch.tensor([1], dtype=torch.int32)  # another graph has a slot that was saturated
    in_place = [tensor.clone() for tensor in (pending, history, scales, counts, room)]
    rule = (448.0, "p99", 2)
    for step in range(7):
        known = torch.empty_like(scales)
        expected_known = delayed.next_scales_op(pending, history, scales, counts, room, *rule)
        history, scales, counts, room = delayed.update_op(pending, history, scales, counts, room, *rule)
        recorded = [torch.rand(1, 1, generator=generator) * 4**step for _ in range(4)]
        rows = [5, 0, 2, 0]
        delayed.update_in_place_op(*in_place, known, *rule)
        assert (in_place[0] == delayed.ABSENT).all()
        if step == 3:  # several passes in a row, without an update between them
            pending = delayed.accumulate_op(torch.full((6,), delayed.ABSENT), recorded[:2], rows[:2], [])
            pending = delayed.accumulate_op(pending, recorded[2:], rows[2:], [])
            delayed.accumulate_in_place_op(in_place[0], recorded[:2], rows[:2])
            delayed.accumulate_in_place_op(in_place[0], recorded[2:], rows[2:])
        else:
            pending = delayed.record_op(pending, recorded, rows, [])
            delayed.record_in_place_op(in_place[0], recorded, rows)
        assert torch.equal(known, expected_known)
        assert torch.equal(known, torch.where(counts[delayed.LOOK] == 0, scales, 0.0))
        for found, expected in zip(in_place, (pending, history, scales, counts)):
            assert torch.equal(found, expected), step
    assert counts[delayed.SATURATED].any() and not counts[delayed.SATURATED, 2], "room was part of it"


# --- record


@given(st.lists(st.tuples(st.integers(0, 4), amaxes), max_size=10))
def test_a_record_holds_the_largest_of_each_slot_with_nan_above_all(recorded) -> None:
    values, rows = [torch.tensor([[amax]]) for _, amax in recorded], [row for row, _ in recorded]
    for old, found in (
        (f32(-1), delayed.record(torch.full((5,), 3.0), values, rows)),
        (f32(3), delayed.accumulate(torch.full((5,), 3.0), values, rows)),
    ):
        for slot in range(5):
            mine = [old, *(f32(amax) for row, amax in recorded if row == slot)]
            expected = f32(np.nan) if any(map(np.isnan, mine)) else max(mine)
            np.testing.assert_array_equal(found[slot].numpy(), expected)


# --- count


@settings(max_examples=150)
@given(
    st.lists(
        st.one_of(st.sampled_from([0.0, math.inf, -math.inf, math.nan]), st.floats(-(2.0**50), 2.0**50, width=32)),
        min_size=1, max_size=20,
    ),
    st.sampled_from([2.0**-20, 2.0**-3, 1.0, 37.5, 2.0**12]),
    st.sampled_from((E4M3, E5M2)),
)  # fmt: skip
def test_counts_are_those_of_a_loop_over_the_elements(values, scale, format) -> None:
    x, quant_scale = torch.tensor(values)[None], torch.tensor([[scale]])
    q = delayed.cast_delayed(x, quant_scale, format.dtype)
    found = delayed.count(x, q, quant_scale, 1 / quant_scale, format.max)
    elements = saturated = flushed = 0
    signal = noise = 0.0
    for value in map(float, x[0].tolist()):
        if not math.isfinite(value):
            continue
        scaled = float(f32(f32(value) * f32(scale)))
        back = float(TABLES[format.dtype].round(np.array([np.clip(scaled, -format.max, format.max)]))[0])
        elements, saturated = elements + 1, saturated + (abs(scaled) > format.max * (1 + 2.0**-20))
        flushed += value != 0 and back == 0
        signal, noise = signal + value**2, noise + (value - back * float(f32(1) / f32(scale))) ** 2
    assert found.dtype == torch.float64 and found[:3].tolist() == [elements, saturated, flushed]
    assert found[3].item() == pytest.approx(signal, rel=1e-5)
    assert found[4].item() == pytest.approx(noise, rel=1e-3, abs=1e-10 * signal)


@pytest.mark.parametrize("magnitude", [1e-30, 1e30])
def test_signal_and_noise_of_values_far_from_one_neither_vanish_nor_overflow(magnitude: float) -> None:
    x = torch.linspace(0.1, 1, 50)[None] * magnitude
    scale = delayed.scale_of(x.abs().amax().view(1, 1), E5M2.max)
    counted = delayed.count(x, delayed.cast_delayed(x, scale, E5M2.dtype), scale, 1 / scale, E5M2.max)
    assert counted[3].item() == pytest.approx(x.double().square().sum().item(), rel=1e-5, abs=0)
    assert 20 < 10 * math.log10(counted[3] / counted[4]) < 40


def test_counts_are_added_to_their_rows_and_to_no_others() -> None:
    stats = torch.arange(20, dtype=torch.float64).view(4, 5)
    one, two = torch.ones(5, dtype=torch.float64), torch.full((5,), 10.0, dtype=torch.float64)
    after = delayed.add_counts(stats, [one, two, one], [2, 0, 2])
    assert torch.equal(after - stats, torch.tensor([10.0, 0, 2, 0], dtype=torch.float64)[:, None].expand(4, 5))


def test_counts_are_added_without_a_copy_from_the_host() -> None:
    """The one operation with numbers for an argument that a GPU's code calls in every pass."""
    stats = torch.zeros(4, 5, dtype=torch.float64)
    with CalledOps() as ops:
        delayed.add_counts(stats, [stats[0], stats[1]], [2, 0])
    assert not ops.from_the_host


@pytest.mark.parametrize("capability", [90, 100])
def test_what_counts_compiles_for_a_gpu(capability: int) -> None:
    """Triton 3.7 has no conversion from FP8 to FP64."""
    with absent_gpu(capability) as gpu:
        step = gpu.training_step(
            lambda: nn.Linear(64, 48).bfloat16(),
            lambda: (torch.empty(80, 64, dtype=torch.bfloat16, requires_grad=True),),
            backend="fp8",
            options={"target": f"cuda:{capability}", "stats": True},
        )
        for source in (step.forward, step.backward):
            assert "tl.float64" in source
            assert all(kernel.cubin_bytes > 0 for kernel in compile_kernels(source, every_config=False))
