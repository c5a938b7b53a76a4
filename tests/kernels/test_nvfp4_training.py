"""NVFP4 of training: its formulas against torchao's and against FP64, and rounding at random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_compile.kernels import nvfp4_training as nvfp4
from fp8_compile.kernels.quantize import spread

ROWS, TILES = (1, 16), (16, 16)


def enc_of(x: Tensor, largest: float = nvfp4.LARGEST) -> Tensor:
    amax = x.abs().max().float().reshape(1, 1)
    return torch.where(amax == 0, torch.ones(1, 1), (largest / amax).clamp_max(torch.finfo(torch.float32).max))


def quantized(x: Tensor, block=ROWS, *, enc: Tensor | None = None, transpose=False, rotated=False, seed=None, stream=0,
              four_over_six=False) -> tuple[Tensor, Tensor]:  # fmt: skip
    key = None if seed is None else torch.tensor([seed])
    enc = enc_of(x) if enc is None else enc
    return nvfp4.quantize_nvfp4(x, enc, block, transpose, rotated, key, stream, four_over_six)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-20, 1e20])
def test_codes_and_scales_of_rows_are_torchao_s(size: float, generator) -> None:
    tensor = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = torch.randn(64, 256, generator=generator) * size
    per_tensor = x.abs().max() / nvfp4.LARGEST
    theirs_scale, theirs = tensor.nvfp4_quantize(x, 16, per_tensor)
    codes, scales = quantized(x)
    assert torch.equal(scales.view(torch.uint8), theirs_scale.view(torch.uint8).reshape(scales.shape))
    assert torch.equal(codes, theirs.view(torch.uint8).reshape(codes.shape))


def test_a_tile_has_one_scale_and_its_transpose_the_same_values(generator) -> None:
    w = torch.randn(48, 64, generator=generator)
    w[:16, :16] *= 0.01
    codes, scales = quantized(w, TILES)
    other, other_scales = quantized(w, TILES, transpose=True)
    assert scales.shape == (3, 4) and torch.equal(scales.float(), other_scales.float().t())
    assert torch.equal(nvfp4.dequantize_nvfp4(codes, scales), nvfp4.dequantize_nvfp4(other, other_scales).t())
    assert (nvfp4.from_e2m1(codes)[:16, :16].abs().max()) == 6


def test_values_are_within_half_a_step_of_what_was_quantized(generator) -> None:
    x = torch.randn(32, 96, generator=generator)
    codes, scales = quantized(x)
    enc = enc_of(x)
    values = nvfp4.dequantize_nvfp4(codes, scales) / enc
    # A step of E2M1 is 2 at the most, and a scale in E4M3 is 1/16 off, which the largest value of a block saturates at.
    unit = spread(scales.float(), x.shape, ROWS) / enc
    assert ((values - x).abs() <= unit * (1 + 6 / 16)).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_makes_the_scale_of_its_block_nan(bad: float) -> None:
    for block in (ROWS, TILES):
        x = torch.ones(32, 64)
        x[17, 20] = bad
        _, scales = quantized(x, block, enc=torch.full((1, 1), 100.0))
        expected = torch.zeros(32 // block[0], 4, dtype=torch.bool)
        expected[17 // block[0], 1] = True
        assert torch.equal(scales.float().isnan(), expected)


def test_zeros_and_tiny_and_huge_numbers_stay_what_they_are() -> None:
    for x in (torch.zeros(4, 32), torch.full((4, 32), 1e-34), torch.full((4, 32), -3e38)):
        codes, scales = quantized(x)
        values = nvfp4.dequantize_nvfp4(codes, scales) * enc_of(x).reciprocal()
        assert torch.allclose(values, x, rtol=1e-6, atol=0), "its own largest magnitude is exact"


def test_a_rotation_keeps_products_and_is_orthogonal(generator) -> None:
    x, y = (torch.randn(5, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    assert torch.allclose(nvfp4.rotate(x) @ nvfp4.rotate(y).t(), x @ y.t(), rtol=1e-12, atol=1e-12)
    matrix = nvfp4.rotate(torch.eye(16, dtype=torch.float64))
    assert torch.allclose(matrix @ matrix.t(), torch.eye(16, dtype=torch.float64))
    assert torch.equal(matrix.abs(), torch.full((16, 16), 0.25, dtype=torch.float64))
    assert torch.equal(matrix[:, 0], torch.tensor(nvfp4.SIGNS) / 4.0), "signs first, then Sylvester's matrix"
    assert nvfp4.rotate(torch.tensor([nvfp4.SIGNS], dtype=torch.float32)).max() == nvfp4.MOST_GROWTH


def test_philox_gives_the_words_of_the_published_vectors() -> None:
    """The authors' known answer for a counter and a key of zeros."""

    def words(counter: int, stream: int, seed: int) -> list[int]:
        found = nvfp4._philox_words(torch.tensor(seed), torch.tensor([counter]), stream)
        return [int(word) for word in found]

    assert words(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def draws(value: float, *, seed: int = 1, stream: int = 0, op=nvfp4.quantize_nvfp4) -> Tensor:
    """10**6 draws of one value, of which each block's largest is 6: the scale is 1 and ``enc`` as well."""
    x = torch.full((1000, 1008), value)
    x[:, ::16] = 6.0
    codes, scales = op(x, torch.ones(1, 1), ROWS, False, False, torch.tensor([seed]), stream, False)
    assert (scales.float() == 1).all()
    keep = torch.arange(1008) % 16 != 0
    return nvfp4.from_e2m1(codes)[:, keep].reshape(-1)


@pytest.mark.parametrize("value", [0.1, -0.4, 0.75, 1.9, 2.3, -3.5, 3.9, 4.1, 5.5, -5.9])
def test_rounding_at_random_is_unbiased_within_four_sigma(value: float) -> None:
    found = draws(value).double()
    levels = found.unique()
    assert len(levels) == 2 and levels[0] < value < levels[1], "the two neighbours"
    p = (value - levels[0]) / (levels[1] - levels[0])
    sigma = (levels[1] - levels[0]) * (p * (1 - p) / found.numel()).sqrt()
    assert (found.mean() - value).abs() <= 4 * sigma
    assert torch.equal(draws(value, op=nvfp4.quantize_nvfp4_op), found.float()), "the CPU's numbers are the formula's"


def test_the_same_seed_gives_the_same_codes_and_another_stream_independent_ones() -> None:
    first = draws(0.25)
    assert torch.equal(first, draws(0.25))
    for other in (draws(0.25, stream=1), draws(0.25, seed=2), draws(0.25, seed=1 + 2**32)):
        # Of independent fair coins the correlation is 0 with a sigma of 1 / sqrt(n).
        correlation = torch.corrcoef(torch.stack([first, other]))[0, 1]
        assert abs(correlation) <= 4 / first.numel() ** 0.5
    neighbours = torch.corrcoef(torch.stack([first[:-1], first[1:]]))[0, 1]
    assert abs(neighbours) <= 4 / first.numel() ** 0.5


def test_what_e2m1_has_is_never_changed_by_rounding_at_random() -> None:
    for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0):
        assert (draws(value) == value).all()


def test_four_over_six_is_never_worse_than_six(generator) -> None:
    x = torch.randn(64, 256, generator=generator)
    enc = enc_of(x, 1536.0)
    for block in (ROWS, TILES):
        errors = []
        for both in (False, True):
            codes, scales = quantized(x, block, enc=enc, four_over_six=both)
            off = (nvfp4.dequantize_nvfp4(codes, scales) / enc - x) ** 2
            errors.append(nvfp4._block_sum(off, block))
        assert (errors[1] <= errors[0] * (1 + 1e-5)).all() and errors[1].sum() < errors[0].sum()


def test_the_product_is_that_of_the_dequantized_operands(generator) -> None:
    x, w = torch.randn(40, 112, generator=generator), torch.randn(50, 112, generator=generator)
    bias, dequant = torch.randn(50, generator=generator), enc_of(x).reciprocal()
    for block in (ROWS, TILES):
        left, right = quantized(x), quantized(w, block)
        values = (nvfp4.dequantize_nvfp4(*one).double() for one in (left, right))
        exact = next(values) @ next(values).t() * (dequant * dequant).double() + bias
        for op in (nvfp4.nvfp4_mm, nvfp4.nvfp4_train_mm_op):
            y = op(left[0], right[0], left[1], right[1], dequant, dequant, bias, torch.float32)
            assert (y - exact).norm() <= 1e-6 * exact.norm()
