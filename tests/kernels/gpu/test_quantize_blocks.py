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


@each_kind
def test_columns_are_filled_up_with_zeros_even_beside_nan(square: bool, generator) -> None:
    for rows, multiple in ((5, 16), (130, 128), (140, 16)):
        x = torch.randn(rows, 140, generator=generator)
        x[rows - 1, 3] = torch.nan
        with interpreted(quantize_blocks, tile):
            results = quantize_blocks.quantize_blocks(x, E4M3.dtype, square, multiple)
        for actual, expected in zip(results, quantize_blocks.reference(x, E4M3.dtype, square, multiple)):
            check_same(actual.contiguous(), expected.contiguous())
        q_t = results[2]
        assert q_t.shape[1] % multiple == 0 and q_t[:, rows:].numel() and not q_t.view(torch.uint8)[:, rows:].any()


@each_kind
def test_rounding_by_way_of_bf16_gives_what_the_bf16_tensor_gives(square: bool, generator) -> None:
    x = torch.randn(140, 70, generator=generator)
    with interpreted(quantize_blocks, tile):
        via = quantize_blocks.quantize_blocks(x, E4M3.dtype, square, via=torch.bfloat16)
        plain = quantize_blocks.quantize_blocks(x.bfloat16(), E4M3.dtype, square)
    assert all(map(torch.equal, (one.float() for one in via), (one.float() for one in plain)))
    assert not torch.equal(via[1], quantize_blocks.reference(x, E4M3.dtype, square)[1])


@each_kind
def test_one_layout_alone_is_written_and_nothing_else(square: bool, generator, monkeypatch) -> None:
    x = torch.randn(130, 40, generator=generator)
    expected = quantize_blocks.reference(x, E4M3.dtype, square)

    def poisoned(*arguments: object) -> tuple[torch.Tensor, ...]:
        for result in (results := empty_results(*arguments)):
            result.view(torch.uint8).fill_(0xFF) if result.is_contiguous() else result.fill_(torch.nan)
        return results

    empty_results = quantize_blocks.empty_results
    monkeypatch.setattr(quantize_blocks, "empty_results", poisoned)
    for wanted in ("along_rows", "along_columns"):
        asked = {"along_rows": wanted == "along_rows", "along_columns": wanted == "along_columns"}
        with interpreted(quantize_blocks, tile):
            results = quantize_blocks.quantize_blocks(x, E4M3.dtype, square, **asked)
        for index, (actual, wished) in enumerate(zip(results, expected)):
            if (index < 2) == asked["along_rows"]:
                check_same(actual.contiguous(), wished.contiguous())
            else:
                assert actual.float().isnan().all()


def test_lines_of_scales_of_tiles_are_filled_up_with_zeros(generator) -> None:
    for rows, cols in ((130, 600), (520, 100), (500, 1)):
        for scales in check(torch.randn(rows, cols, generator=generator), True)[1::2]:
            lines, tiles = scales.shape
            length = scales.stride(0)
            assert length % 4 == 0 and length - tiles < 4
            beyond = scales.as_strided((lines, length), (length, 1))[:, tiles:]
            assert torch.equal(beyond, torch.zeros_like(beyond))


def test_a_multiple_that_a_tile_does_not_reach_to_is_refused() -> None:
    with pytest.raises(ValueError, match="divides 128.*got 48"):
        quantize_blocks.quantize_blocks(torch.ones(3, 3), E4M3.dtype, True, multiple=48)
