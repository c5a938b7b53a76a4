"""quantize_rows gives the reference's bytes and scales: rows alone, in one read or several, and rows and columns."""

from __future__ import annotations

import pytest
import torch
from interpreted import check_same, interpreted

from fp8_compile.kernels.formats import BY_DTYPE, E4M3, Format
from fp8_compile.kernels.gpu import quantize_rows, tile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHORT = 64  # a row longer than this is read twice
each_format = pytest.mark.parametrize("format", list(BY_DTYPE.values()), ids=str)


def check(x: torch.Tensor, format: Format = E4M3) -> tuple[torch.Tensor, ...]:
    with interpreted(quantize_rows, tile):
        once = quantize_rows.quantize_rows(x, format.dtype)
        twice = quantize_rows.quantize_rows(x, format.dtype, longest=SHORT)
        both = quantize_rows.quantize_rows_columns(x, format.dtype)
    for results in (once, twice):
        for actual, expected in zip(results, quantize_rows.reference_rows(x, format.dtype)):
            check_same(actual, expected)
    for actual, expected in zip(both, quantize_rows.reference_rows_columns(x, format.dtype)):
        check_same(actual, expected)
    return both


@each_format
def test_odd_sizes_are_bit_equal_to_the_reference(format: Format, generator) -> None:
    for dtype, (rows, cols) in zip(DTYPES * 2, [(1, 1), (1, 131), (70, 1), (3, 64), (65, 67), (7, 200)]):
        x = torch.randn(rows, cols, generator=generator) * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)
        check(x.to(dtype), format)


def test_transposed_strided_and_expanded_inputs_are_bit_equal_to_the_reference(generator) -> None:
    base = torch.randn(30, 80, generator=generator)
    for x in (base.t(), base[::2, 1::3], base[5:20, 7:70], base[:1].expand(9, 80)):
        check(x)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_inf_or_nan_makes_the_scale_of_its_row_and_of_its_column_nan(bad: float, generator) -> None:
    x = torch.randn(10, 90, generator=generator)
    x[7, 80] = bad
    _, dequant, _, dequant_t = check(x)
    assert dequant.isnan().nonzero().tolist() == [[7, 0]]
    assert dequant_t.isnan().nonzero().tolist() == [[80, 0]]


def test_zeros_tiny_and_huge_values_are_bit_equal_with_finite_scales() -> None:
    ramp = torch.linspace(-1, 1, 67 * 3, dtype=torch.float64).reshape(3, 67)
    for magnitude in (0.0, 1e-45, 1e-40, 1e-13, 1e-12, 1e38, 3.4e38):
        assert all(scale.isfinite().all() for scale in check((ramp * magnitude).float())[1::2])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_matrix_gives_the_references_finite_scales(shape: tuple[int, int]) -> None:
    assert all(scale.isfinite().all() for scale in check(torch.zeros(shape))[1::2])


@pytest.mark.parametrize("along_rows", [True, False])
def test_columns_are_filled_up_and_rounded_by_way_of_bf16_with_or_without_rows(along_rows: bool, generator) -> None:
    x = torch.randn(70, 50, generator=generator)
    x[69, 3] = torch.nan
    options = {"multiple": 16, "via": torch.bfloat16}
    with interpreted(quantize_rows, tile):
        results = quantize_rows.quantize_rows_columns(x, E4M3.dtype, **options, along_rows=along_rows)
        alone = quantize_rows.quantize_rows(x, E4M3.dtype, via=torch.bfloat16)
    expected = quantize_rows.reference_rows_columns(x, E4M3.dtype, **options)
    for actual, wished in zip(results if along_rows else (*alone, *results[2:]), expected):
        check_same(actual, wished)
    assert results[2].shape == (50, 80) and not results[2].view(torch.uint8)[:, 70:].any()
    assert not torch.equal(expected[1], quantize_rows.reference_rows(x, E4M3.dtype)[1])


def test_a_multiple_that_a_tile_does_not_reach_to_is_refused() -> None:
    with pytest.raises(ValueError, match="divides 64.*got 128"):
        quantize_rows.quantize_rows_columns(torch.ones(3, 3), E4M3.dtype, multiple=128)
