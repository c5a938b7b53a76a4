"""The C++ of a delayed quantize against the plain formulas, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8_compile.kernels import delayed_scaling as plain
from fp8_compile.kernels.cpu.quantize import quantize_delayed_op
from fp8_compile.kernels.formats import E4M3, E5M2, Format
from fp8_compile.kernels.quantize import block_amax, quantize

FORMATS = (E4M3, E5M2)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
each_format = pytest.mark.parametrize("format", FORMATS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def wide(rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values over many orders of magnitude, so that some round to subnormals and to zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    return (x * torch.exp(3 * torch.randn(rows, cols, generator=generator))).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all of them."""
    whole = {1: torch.uint8, 4: torch.int32}[x.element_size()]
    return torch.where(x.float().isnan(), 0x7F, x.contiguous().view(whole).to(torch.int64))


def formula(x: torch.Tensor, scale: torch.Tensor, format: Format) -> tuple[torch.Tensor, ...]:
    amax = block_amax(x, (-1, -1))
    used = plain.first_scale(scale, amax, format.max)
    q = plain.cast_delayed(x, used, format.dtype)
    return q, used, used.reciprocal(), amax


NAMES = ("codes", "used_scale", "dequant_scale", "amax")


def check(
    x: torch.Tensor, scale: float, format: Format, wanted: bool = True, op=quantize_delayed_op
) -> tuple[torch.Tensor, ...]:
    given_scale = torch.full((1, 1), scale)
    found = op(x, given_scale, format.dtype, wanted)
    for name, value, expected in zip(NAMES, found, formula(x, given_scale, format), strict=True):
        if name == "codes" and not wanted:
            assert value.numel() == 0 and value.dtype == expected.dtype
            continue
        assert value.shape == expected.shape and value.dtype == expected.dtype, name
        assert torch.equal(bits(value), bits(expected)), name
    assert torch.equal(given_scale, torch.full((1, 1), scale)), "the state itself is not written"
    return found


@pytest.mark.parametrize("scale", [0.0, 0.02, 3.0, 1e4])
@each_format
@each_dtype
@pytest.mark.parametrize("shape", [(33, 77), (1, 1), (1, 5), (5, 1), (3, 4097), (2, 4096)], ids=str)
def test_everything_is_bit_equal_to_the_formula(shape, dtype, format, scale) -> None:
    check(wide(*shape, dtype), scale, format)


@settings(max_examples=80)
@given(
    st.integers(1, 40), st.integers(1, 300), st.sampled_from(DTYPES), st.sampled_from(FORMATS),
    st.booleans(), st.sampled_from([0.0, 1.0, 2.0**-9, 300.0]), st.integers(0, 10**6),
)  # fmt: skip
def test_any_size_and_choice_of_results_is_bit_equal(rows, cols, dtype, format, wanted, scale, seed):
    check(wide(rows, cols, dtype, seed), scale, format, wanted)


@settings(max_examples=60)
@given(
    st.integers(1, 30), st.integers(1, 300), st.sampled_from(DTYPES), st.sampled_from(FORMATS), st.booleans(),
    st.sampled_from([math.inf, -math.inf, math.nan]), st.sampled_from([0.0, 2.5]), st.integers(0, 10**6),
)  # fmt: skip
def test_inf_and_nan_anywhere_become_nan_and_show_in_the_amax(rows, cols, dtype, format, wanted, bad, scale, seed):
    x = wide(rows, cols, dtype, seed).clamp(-1e4, 1e4)  # no Inf of its own in FP16
    at = seed % x.numel()
    x.view(-1)[at] = bad
    codes, used, _, amax = check(x, scale, format, wanted=wanted)
    assert not math.isfinite(amax.item()) and (math.isnan(bad) == math.isnan(amax.item()))
    assert used.item() == (scale or 1.0), "such a tensor has no scale of its own"
    if wanted:
        nans = codes.float().view(-1).isnan()
        assert nans[at] and nans.sum() == 1


@each_format
def test_without_a_scale_the_largest_element_gets_the_largest_code(format: Format) -> None:
    x = torch.tensor([[0.5, -3e-5, 7e-6]])
    codes, used, dequant_scale, amax = check(x, 0.0, format)
    assert codes[0, 0].float() == format.max and amax.item() == 0.5
    assert used.item() == pytest.approx(2 * format.max) and dequant_scale.item() == pytest.approx(0.5 / format.max)


@each_format
def test_the_own_scale_is_tensorwise_scalings_and_never_infinite_or_zero(format: Format) -> None:
    for magnitude in (1e-45, 1e-38, 1e-20, 1.0, 1e20, 3e38):
        x = torch.full((3, 3), magnitude)
        used = check(x, 0.0, format)[1]
        assert 0 < used.item() < math.inf
        if magnitude > 1e-12:  # tensorwise scaling takes what is smaller for that
            _, dequant_scale = quantize(x, format.dtype, (-1, -1))
            assert used.item() == pytest.approx(1 / dequant_scale.item(), rel=1e-6)


@each_dtype
@each_format
def test_zeros_are_zeros_with_a_scale_of_one_and_keep_their_signs(format: Format, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0, 0.0]], dtype=dtype)
    codes, used, _, amax = check(x, 0.0, format)
    assert codes.view(torch.uint8).tolist() == [[0, 0x80, 0]] and used.item() == 1 and amax.item() == 0


@each_dtype
@each_format
def test_every_16_bit_value_is_cast_as_the_formula_casts_it(format: Format, dtype: torch.dtype) -> None:
    if dtype == torch.float32:
        x = torch.arange(2**16, dtype=torch.int32).mul(65537).view(torch.float32)
    else:
        x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    for scale in (1.0, 0.37, 2.0**20):
        check(x.view(256, 256), scale, format)


@each_format
def test_strides_of_the_input_do_not_matter(format: Format) -> None:
    base = wide(40, 60, torch.float32)
    for x in (base.t(), base[::2], base[:, ::3], base[:, 5:9], base[:1].expand(7, 60)):
        for scale in (0.0, 2.0):
            check(x, scale, format)


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
@pytest.mark.parametrize("scale, used", [(0.0, 1.0), (2.0, 2.0)])
def test_an_empty_matrix_has_an_amax_of_zero_and_no_codes(shape: tuple[int, int], scale: float, used: float) -> None:
    codes, *scales = quantize_delayed_op(torch.empty(shape), torch.full((1, 1), scale), E4M3.dtype, True)
    assert codes.shape == shape
    assert [part.item() for part in scales] == [used, 1 / used, 0.0]


@each_dtype
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    x, before = wide(257, 513, dtype), torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for scale in (0.0, 5.0):
                check(x, scale, E4M3)
    finally:
        torch.set_num_threads(before)


def test_the_op_and_its_fake_agree_on_shapes_and_dtypes() -> None:
    for wanted in (True, False):
        arguments = (torch.randn(6, 7), torch.zeros(1, 1), E5M2.dtype, wanted)
        torch.library.opcheck(quantize_delayed_op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("scale", [0.0, 3.0])
def test_without_a_compiler_it_is_the_plain_formula(scale: float) -> None:
    for wanted in (True, False):
        check(wide(33, 77, torch.bfloat16), scale, E5M2, wanted, torch.ops.fp8_compile.quantize_delayed_formula)
