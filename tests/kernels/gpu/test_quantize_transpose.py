"""quantize_transpose gives the reference's bytes in both layouts and the largest magnitude, for any strides."""

from __future__ import annotations

import pytest
import torch
from interpreted import check_same, interpreted

from fp8_compile.kernels.formats import BY_DTYPE, E4M3, Format
from fp8_compile.kernels.gpu import quantize_transpose, tile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_format = pytest.mark.parametrize("format", list(BY_DTYPE.values()), ids=str)


def check(x: torch.Tensor, format: Format = E4M3, scale: float = 20.0) -> torch.Tensor:
    quant_scale, amax = torch.tensor(scale), torch.tensor([tile.NOTHING])
    with interpreted(quantize_transpose, tile):
        q, q_t = quantize_transpose.quantize_transpose(x, quant_scale, format.dtype, amax)
    expected, expected_t, magnitude = quantize_transpose.reference(x, quant_scale, format.dtype)
    check_same(q, expected)
    check_same(q_t, expected_t)
    check_same(amax[0], magnitude)
    return amax[0]


@each_format
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_odd_sizes_are_bit_equal_to_the_reference(format: Format, dtype: torch.dtype, generator) -> None:
    for shape in [(1, 1), (1, 131), (130, 1), (3, 65), (129, 67)]:
        check((torch.randn(shape, generator=generator) * 8).to(dtype), format)


def test_transposed_strided_and_expanded_inputs_are_bit_equal_to_the_reference(generator) -> None:
    base = torch.randn(140, 150, generator=generator)
    for x in (base.t(), base[::2, 1::3], base[5:20, 7:140], base[:1].expand(9, 150), base[:, :1].expand(140, 6)):
        check(x)


@each_format
def test_inf_and_nan_stay_visible_in_both_layouts_and_nan_wins_in_the_amax(format: Format, generator) -> None:
    x = torch.randn(70, 80, generator=generator)
    x[3, 70] = -torch.inf
    assert check(x, format) == torch.inf
    x[69, 0] = torch.nan
    assert check(x, format).isnan()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0), (3, 3)])
def test_an_empty_matrix_and_a_matrix_of_zeros_record_zero(shape: tuple[int, int]) -> None:
    assert check(torch.zeros(shape)) == 0


def test_values_beyond_the_largest_saturate_and_tiny_ones_keep_their_sign() -> None:
    x = torch.tensor([[1e30, -1e30, 1e-30, -1e-30, 0.0, -0.0]])
    assert check(x, scale=1e10) == 1e30
