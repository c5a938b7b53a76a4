"""Quantize gives the reference's bytes and scales, for every blocking, dtype, stride and kind of number."""

from __future__ import annotations

import fp8_reference as reference
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from fp8_compile.kernels.cpu.quantize import cast_op, scales_op
from fp8_compile.kernels.quantize import block_amax, dequantize, quantize, quantize_op, spread

TENSOR, ROW, COLUMN, ROW_BLOCK, COLUMN_BLOCK, TILE = (-1, -1), (1, -1), (-1, 1), (1, 128), (128, 1), (128, 128)
BLOCKS = [TENSOR, ROW, COLUMN, ROW_BLOCK, COLUMN_BLOCK, TILE]  # COLUMN_BLOCK: 1x128 of a tensor that lies transposed
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda block: "x".join(map(str, block)))
each_format = pytest.mark.parametrize("format", reference.FORMATS, ids=lambda format: format.name)
E4M3 = reference.E4M3
LARGEST = torch.finfo(torch.float32).max


def check(x: torch.Tensor, format: reference.Fp8, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bit-equal to the reference: the function, the op, and the CPU's C++ where it has the blocking and the format."""
    expected = reference.quantize(x, format, block)
    in_cpp = -1 in block and format in (reference.E4M3, reference.E5M2)
    for run in (in_cpp_quantize, quantize, quantize_op) if in_cpp else (quantize, quantize_op):
        q, dequant_scale = run(x, format.dtype, list(block))
        assert q.dtype == format.dtype and dequant_scale.dtype == torch.float32
        np.testing.assert_array_equal(dequant_scale.numpy(), expected.dequant_scale)
        check_codes(q, expected.codes, format)
    return q, dequant_scale


def in_cpp_quantize(x: torch.Tensor, dtype: torch.dtype, block: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    quant_scale, dequant_scale = scales_op(x, dtype, block)
    return cast_op(x, quant_scale, dtype, block), dequant_scale


def check_codes(q: torch.Tensor, expected: np.ndarray, format: reference.Fp8) -> None:
    """The same bytes, the sign of a zero included; a NaN may be any of the format's NaNs."""
    codes = reference.codes_of(q)
    nan = np.isnan(format.values[expected])
    np.testing.assert_array_equal(np.isnan(format.values[codes]), nan)
    np.testing.assert_array_equal(codes[~nan], expected[~nan])


@each_format
@each_block
def test_odd_shapes_with_ragged_blocks_are_bit_equal_to_the_reference(block, format, generator) -> None:
    for dtype, (rows, cols) in zip(DTYPES * 2, [(1, 1), (1, 131), (130, 1), (3, 129), (129, 131), (131, 257)]):
        x = torch.randn(rows, cols, generator=generator) * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)
        check(x.to(dtype), format, block)


@each_block
def test_transposed_strided_and_expanded_inputs_are_bit_equal_to_the_reference(block, generator) -> None:
    base = torch.randn(140, 150, generator=generator)
    for x in (base.t(), base[::2, 1::3], base[5:20, 7:140], base[:1].expand(9, 150), base[:, :1].expand(140, 6)):
        q, _ = check(x, E4M3, block)
        assert q.shape == x.shape
    assert quantize_op(base.t(), E4M3.dtype, list(block))[0].is_contiguous(), "the op gives a row-major tensor"


@each_format
@each_block
def test_zeros_stay_zeros_with_a_finite_scale(block, format) -> None:
    for dtype in DTYPES:
        q, dequant_scale = check(torch.zeros(130, 5, dtype=dtype), format, block)
        assert not reference.codes_of(q).any()
        assert dequant_scale.isfinite().all() and (dequant_scale > 0).all()


@each_block
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", [reference.E4M3, reference.E5M2], ids=lambda format: format.name)
def test_subnormals_and_the_extremes_of_the_dtype_are_bit_equal_to_the_reference(block, dtype, format) -> None:
    info = torch.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    for magnitude in (smallest, info.smallest_normal / 2, info.tiny, 1e-13, 1e-12, 1.0, info.max / 3, info.max):
        x = torch.linspace(-1, 1, 129 * 3, dtype=torch.float64).reshape(3, 129) * magnitude
        _, dequant_scale = check(x.to(dtype), format, block)
        assert dequant_scale.isfinite().all(), magnitude


@each_format
def test_the_largest_magnitude_becomes_the_largest_value_whatever_its_bits(format) -> None:
    """``amax * quant_scale`` may round to just above or below F; the cast must land on F in both cases."""
    amax = torch.logspace(-11, 37, 4001, dtype=torch.float64).float()[:, None]
    for sign in (1, -1):
        q, _ = quantize(sign * amax, format.dtype, ROW)
        assert (q.double() == sign * format.max).all()


@each_format
def test_dequant_scale_is_amax_over_the_largest_value_up_to_its_three_roundings(format, generator) -> None:
    """Bit-equality above fixes the order of operations; this fixes that the order approximates the formula.

    Three FP32 operations round by 2**-24 each, and above 2**126 the reciprocal is subnormal: half its spacing, 2**-150,
    relative to 1 / amax. Everything to first order, hence the factor for what is left.
    """
    amax = 10 ** (torch.rand(5000, 1, dtype=torch.float64, generator=generator) * 50 - 12)
    amax = torch.cat([amax, torch.tensor([[3.3e38], [1e38], [1e-12]], dtype=torch.float64)]).float()
    _, dequant_scale = quantize(amax, format.dtype, ROW)
    exact = amax.double().clamp_min(1e-12) / format.max
    relative = (dequant_scale.double() / exact - 1).abs()
    assert (relative <= (3 * 2.0**-24 + 2.0**-150 * amax.double()) * (1 + 2.0**-20)).all()


@each_block
def test_round_trip_error_is_at_most_half_a_step_of_the_format(block, generator) -> None:
    x = torch.randn(131, 259, generator=generator)
    restored = dequantize(*quantize(x, E4M3.dtype, block), block)
    scale = spread(quantize(x, E4M3.dtype, block)[1], x.shape, block).expand_as(x).double()
    # Half a step: 2**-4 of a normal value, 2**-10 (in units of the scale) of a subnormal one; FP32 adds its roundings.
    step = torch.maximum(x.double().abs() * 2.0**-4, scale * 2.0**-10)
    assert ((restored.double() - x.double()).abs() <= step * (1 + 2.0**-18)).all()


@each_block
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_inf_or_nan_makes_the_scale_of_its_block_nan_and_leaves_the_others_alone(bad, block, generator) -> None:
    inside = torch.zeros(140, 135, dtype=torch.bool)
    inside[_of_block(129, block[0]), _of_block(3, block[1])] = True
    scale_inside = block_amax(inside.float(), block) > 0
    assert scale_inside.sum() == 1
    for dtype, format in zip(DTYPES, reference.FORMATS):
        x = torch.randn(140, 135, generator=generator).to(dtype)
        clean_q, clean_scale = quantize(x, format.dtype, block)
        x[129, 3] = bad
        q, dequant_scale = check(x, format, block)
        assert torch.equal(dequant_scale.isnan(), scale_inside)
        assert torch.equal(dequant_scale[~scale_inside], clean_scale[~scale_inside])
        assert np.array_equal(reference.codes_of(q)[~inside], reference.codes_of(clean_q)[~inside])
        assert torch.equal(dequantize(q, dequant_scale, block).isnan(), inside), "non-finite values never vanish"


def _of_block(index: int, size: int) -> slice:
    return slice(None) if size == -1 else slice(index // size * size, (index // size + 1) * size)


# The op's fake result promises these shapes, and a layer that gets no tokens (an expert without a share) asks for them.
@each_block
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (0, 300), (300, 0)])
def test_an_empty_matrix_gives_what_the_fake_op_promises_with_finite_scales(block, shape) -> None:
    x = torch.zeros(shape)
    with torch._subclasses.FakeTensorMode() as mode:
        fake_q, fake_scale = quantize_op(mode.from_tensor(x), E4M3.dtype, list(block))
    for run in (quantize_op, in_cpp_quantize) if -1 in block else (quantize_op,):
        q, dequant_scale = run(x, E4M3.dtype, list(block))
        assert q.shape == fake_q.shape == shape
        assert dequant_scale.shape == fake_scale.shape
        assert dequant_scale.isfinite().all()


@each_block
def test_fake_results_are_those_of_the_op_in_shape_stride_and_dtype(block) -> None:
    x = torch.randn(257, 129, dtype=torch.bfloat16).t()
    torch.library.opcheck(quantize_op, (x, E4M3.dtype, list(block)), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    "x",
    [torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(2, 3).double(), torch.zeros(2, 3).int()],
    ids=["1-D", "3-D", "float64", "int32"],
)
def test_another_rank_or_dtype_is_an_error_that_says_what_was_expected(x: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"quantize: x: expected torch.float32 or .* of shape \(any, any\) .*, got"):
        quantize_op(x, E4M3.dtype, list(TENSOR))


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Any FP32/bf16/fp16 matrix, any kind of number in it, contiguous or not."""
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    # Repeated up to 31 times, so that blocks of 128 are met whole, ragged and several at a time.
    repeats = draw(st.tuples(st.integers(1, 31), st.integers(1, 31)))
    elements = st.one_of(
        st.floats(width=32),  # with Inf, NaN, subnormals
        st.floats(-8, 8, width=32),
        st.sampled_from([0.0, -0.0, 1e-12, -1e-40, 448.0, 3e38, float("nan"), float("inf")]),
    )
    x = torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=elements)))
    x = x.repeat(repeats).to(draw(st.sampled_from(DTYPES)))
    layout = draw(st.sampled_from(["contiguous", "transposed", "every other", "expanded"]))
    if layout == "transposed":
        x = x.t()
    elif layout == "every other":
        x = x[::2, ::2]
    elif layout == "expanded":
        x = x[:1].expand(draw(st.integers(1, 140)), x.shape[1])
    return x


@hypothesis.given(x=matrices(), format=st.sampled_from(reference.FORMATS), block=st.sampled_from(BLOCKS))
def test_any_matrix_of_any_layout_is_bit_equal_to_the_reference(x, format, block) -> None:
    check(x, format, block)


@hypothesis.given(x=matrices(), format=st.sampled_from(reference.FORMATS), block=st.sampled_from(BLOCKS))
@hypothesis.example(x=torch.tensor([[LARGEST]]), format=reference.E4M3, block=TENSOR)
def test_a_block_is_nan_throughout_if_and_only_if_something_in_it_was_not_finite(x, format, block) -> None:
    q, dequant_scale = quantize(x, format.dtype, block)
    holds_bad = block_amax((~x.isfinite()).float(), block) > 0
    assert torch.equal(dequant_scale.isnan(), holds_bad)
    restored = dequantize(q, dequant_scale, block)
    assert torch.equal(restored.isnan(), spread(holds_bad, x.shape, block).expand_as(x))
    # Within three units in the last place of FP32's largest number, F times the rounded scale may pass it.
    assert not (restored.isinf() & (x.float().abs() < LARGEST * (1 - 2**-21))).any()


@hypothesis.given(
    x=hnp.arrays(np.float32, (3, 7), elements=st.floats(2.0**-20, 2.0**20, width=32)),
    signs=hnp.arrays(np.int8, (3, 7), elements=st.sampled_from([-1, 0, 1])),
    exponent=st.integers(-10, 60),
    block=st.sampled_from(BLOCKS),
)
def test_a_power_of_two_moves_into_the_scale_and_leaves_the_bytes_alone(x, signs, exponent, block) -> None:
    """The scale is what carries magnitude, as long as it is above the floor and FP32 can hold it."""
    signs[:, 0] = signs[0] = 1  # no block is all zeros, whose scale is the floor's
    matrix = torch.from_numpy(x * signs)
    q, dequant_scale = quantize(matrix, E4M3.dtype, block)
    moved_q, moved_scale = quantize(matrix * 2.0**exponent, E4M3.dtype, block)
    assert torch.equal(moved_scale, dequant_scale * 2.0**exponent)
    assert np.array_equal(reference.codes_of(moved_q), reference.codes_of(q))
