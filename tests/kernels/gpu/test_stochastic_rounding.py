"""Stochastic rounding: the reference's bytes from the same random words, unbiased, reproducible, any block size."""

from __future__ import annotations

import pytest
import torch
from interpreted import check_same, interpreted

from fp8_compile.kernels.formats import BY_DTYPE, E4M3, E5M2, Format
from fp8_compile.kernels.gpu import stochastic_rounding, tile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_format = pytest.mark.parametrize("format", list(BY_DTYPE.values()), ids=str)


def quantize(x: torch.Tensor, format: Format, scale: float = 1.0, seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    amax = torch.tensor([tile.NOTHING])
    with interpreted(stochastic_rounding, tile):
        q = stochastic_rounding.quantize_stochastic(x, torch.tensor(scale), format.dtype, amax, seed)
    return q, amax[0]


def check(x: torch.Tensor, format: Format, scale: float = 1.0, seed: int = 7) -> torch.Tensor:
    q, amax = quantize(x, format, scale, seed)
    random = stochastic_rounding.random_integers(seed, x.numel())
    expected, magnitude = stochastic_rounding.reference(x, torch.tensor(scale), format.dtype, random)
    check_same(q, expected)
    check_same(amax, magnitude)
    return q


@each_format
def test_values_of_all_sizes_are_bit_equal_to_the_reference(format: Format, generator) -> None:
    for dtype, shape in zip(DTYPES, [(67, 131), (4097,), (5,)]):
        x = torch.randn(shape, generator=generator)
        x = (x * 2.0 ** torch.randint(-22, 12, shape, generator=generator)).to(dtype)
        check(x, format, scale=1.7)


def test_the_words_are_those_of_philox4x32_10() -> None:
    """Known answers of Random123 for counter 0 and key 0, and for every bit of the key set."""
    first = stochastic_rounding.random_integers(0, 4).tolist()
    assert first == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    words = stochastic_rounding.random_integers(2**63 + 12345, 50_000)
    assert words.min() >= 0 and words.max() < 2**32
    assert abs(words.double().mean() / 2**31 - 1) < 0.02


@each_format
def test_the_mean_over_many_draws_is_the_value_subnormal_or_normal(format: Format) -> None:
    """A mean of n draws between neighbours a step apart lies within 5 * step / (2 * sqrt(n)) but for one in 10**6."""
    smallest = 2.0 ** (format.min_exponent - format.significand_bits + 1)
    draws = 4096
    for value in (0.25 * smallest, 1.4 * smallest, -2.6 * smallest, 1.03, -3.9, 0.97 * format.max):
        q, _ = quantize(torch.full((draws,), value), format)
        neighbours = q.double().unique()
        step = (neighbours.max() - neighbours.min()).item()
        assert len(neighbours) == 2, "one of the two neighbours"
        assert neighbours.min() < value < neighbours.max()
        assert abs(q.double().mean().item() - value) < 2.5 * step / draws**0.5


@each_format
def test_values_of_the_format_stay_as_they_are(format: Format) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(format.dtype)
    exact = every[every.float().isfinite()]
    check_same(check(exact.float(), format), exact)


@each_format
def test_beyond_the_largest_saturates_and_inf_and_nan_become_nan(format: Format) -> None:
    x = torch.tensor([format.max * 1.5, -3e38, torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45])
    q = check(x, format).float()
    assert q[:2].tolist() == [format.max, -format.max]
    assert q[2:5].isnan().all()
    assert q[5:].tolist() == [0.0, 0.0, 0.0]


def test_a_seed_gives_the_same_bytes_for_any_block_size_and_another_seed_others(monkeypatch, generator) -> None:
    x = torch.randn(5000, generator=generator)
    q = check(x, E5M2, seed=1).view(torch.uint8)
    other = check(x, E5M2, seed=2).view(torch.uint8)
    assert 0.2 < (q != other).float().mean() < 0.8
    for block in (64, 1024):
        monkeypatch.setattr(stochastic_rounding, "BLOCK", block)
        assert torch.equal(check(x, E5M2, seed=1).view(torch.uint8), q)


def test_an_empty_tensor_records_zero_and_one_that_is_not_contiguous_is_an_error() -> None:
    assert quantize(torch.zeros(0), E4M3)[1] == 0
    with pytest.raises(ValueError, match="contiguous"):
        quantize(torch.zeros(4, 6).t(), E4M3)
