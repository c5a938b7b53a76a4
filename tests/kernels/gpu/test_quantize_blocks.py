"""quantize_blocks gives the reference's bytes and scales in both layouts, for 1x128 and 128x128."""

from __future__ import annotations

import pytest
import torch
from interpreted import check_same, interpreted

from fp8_compile.kernels.formats import BY_DTYPE, E4M3, Format
from fp8_compile.kernels.gpu import quantize_blocks, tile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_format = pytest.mark.parametrize("format", list(BY_DTYPE.values()), ids=str)
each_kind = pytest.mark.parametrize("square", [False, True], ids=["1x128", "128x128"])


def check(x: torch.Tensor, square: bool, format: Format = E4M3) -> tuple[torch.Tensor, ...]:
    with interpreted(quantize_blocks, tile):
        results = quantize_blocks.quantize_blocks(x, format.dtype, square)
    for actual, expected in zip(results, quantize_blocks.reference(x, format.dtype, square)):
        check_same(actual.contiguous(), expected.contiguous())
    return results


@each_kind
@each_format
def test_odd_sizes_are_bit_equal_to_the_reference(square: bool, format: Format, generator) -> None:
    for dtype, (rows, cols) in zip(DTYPES * 2, [(1, 1), (1, 131), (130, 1), (3, 129), (129, 131), (131, 257)]):
        x = torch.randn(rows, cols, generator=generator) * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)
        check(x.to(dtype), square, format)


@each_kind
def test_transposed_strided_and_expanded_inputs_are_bit_equal_to_the_reference(square: bool, generator) -> None:
    base = torch.randn(140, 150, generator=generator)
    for x in (base.t(), base[::2, 1::3], base[5:20, 7:140], base[:1].expand(9, 150)):
        check(x, square)


@each_kind
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_inf_or_nan_makes_the_scale_of_its_block_nan_in_both_layouts(square: bool, bad: float, generator) -> None:
    x = torch.randn(140, 135, generator=generator)
    x[129, 3] = bad
    _, dequant, _, dequant_t = check(x, square)
    assert dequant.isnan().sum() == 1 and dequant_t.isnan().sum() == 1


@each_kind
def test_zeros_tiny_and_huge_values_are_bit_equal_with_finite_scales(square: bool) -> None:
    ramp = torch.linspace(-1, 1, 129 * 3, dtype=torch.float64).reshape(3, 129)
    for magnitude in (0.0, 1e-45, 1e-40, 1e-13, 1e-12, 1e38, 3.4e38):
        _, dequant, _, dequant_t = check((ramp * magnitude).float(), square)
        assert dequant.isfinite().all() and dequant_t.isfinite().all()


@each_kind
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_an_empty_matrix_gives_empty_results(square: bool, shape: tuple[int, int]) -> None:
    q, dequant, q_t, dequant_t = check(torch.zeros(shape), square)
    assert q.shape == shape and q_t.shape == shape[::-1]


@each_format
def test_a_128x128_tile_has_the_same_bytes_in_both_layouts(format: Format, generator) -> None:
    q, _, q_t, _ = check(torch.randn(130, 70, generator=generator), True, format)
    assert torch.equal(q.view(torch.uint8).t(), q_t.view(torch.uint8))
