"""nvfp4_pack gives the reference's bits, and torchao's."""

from __future__ import annotations

import pytest
import torch
from interpreted import check_same, interpreted

from fp8_compile.kernels.gpu import nvfp4_pack, tile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TORCHAO_SMALLEST = 2.0**-6


def global_scale_of(x: torch.Tensor) -> torch.Tensor:
    return x.float().abs().max() / (448.0 * 6.0)


def check(x: torch.Tensor, scale: torch.Tensor, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    with interpreted(nvfp4_pack, tile):
        results = nvfp4_pack.nvfp4_pack(x, scale, **options)
    for actual, expected in zip(results, nvfp4_pack.reference(x, scale, **options)):
        check_same(actual, expected)
    return results


def dequantized(codes: torch.Tensor, block_scales: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    nibbles = torch.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1).long()
    values = torch.tensor(nvfp4_pack.E2M1)[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)
    return values * block_scales.float().repeat_interleave(16, 1) * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (33, 272), (300, 16)])
def test_odd_sizes_are_bit_equal_to_the_reference_and_near_the_values(shape, dtype, generator) -> None:
    x = torch.randn(shape, generator=generator)
    x = (x * 2.0 ** torch.randint(-3, 3, (shape[0], 1), generator=generator)).to(dtype)
    scale = global_scale_of(x)
    codes, block_scales = check(x, scale)
    error = (dequantized(codes, block_scales, scale) - x.float()).abs().reshape(shape[0], -1, 16)
    amax = x.float().abs().reshape(shape[0], -1, 16).amax(-1, keepdim=True)
    # Half of the largest step, 2 of 6, and what rounding the block's scale to E4M3 adds.
    assert (error <= amax * (1 / 6 + 1 / 16)).all()


def test_bit_equal_to_torchao_whatever_the_spread_of_the_blocks(generator) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(65, 256, generator=generator)
        x = (x * 2.0 ** torch.randint(-8, 8, (65, 1), generator=generator)).to(dtype)
        x[4] = 0
        scale = global_scale_of(x)
        block_scales, codes = nvfp4_quantize(x, 16, scale)
        ours, our_scales = check(x, scale, smallest=TORCHAO_SMALLEST)
        check_same(ours, codes.view(torch.uint8))
        check_same(our_scales, block_scales)
        # Without torchao's floor, the same wherever the floor does not matter.
        ours, our_scales = check(x, scale)
        large = block_scales.float() > TORCHAO_SMALLEST
        assert 0.3 < large.float().mean() < 1
        check_same(our_scales[large], block_scales[large])
        check_same(ours.reshape(65, 16, 8)[large], codes.view(torch.uint8).reshape(65, 16, 8)[large])


def test_ties_go_to_the_even_code_and_signs_are_kept() -> None:
    """A block whose scale is 1: the largest value is 6, the global scale 1."""
    x = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -0.0]])
    codes, block_scales = check(x, torch.tensor(1.0))
    assert block_scales.float().tolist() == [[1.0]]
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten().tolist()
    assert nibbles == [7, 0, 2, 2, 4, 4, 6, 6, 15, 8, 10, 10, 12, 12, 14, 8]


def test_zeros_give_zeros_whatever_the_global_scale() -> None:
    x = torch.randn(4, 64)
    x[1] = 0
    codes, block_scales = check(x, global_scale_of(x))
    assert not codes[1].any() and block_scales.float().isfinite().all()
    nothing = torch.zeros(4, 64)
    codes, block_scales = check(nothing, global_scale_of(nothing))
    assert not codes.any() and (block_scales.float() == 2.0**-9).all()


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_nan_makes_its_blocks_scale_nan_and_inf_its_largest(bad: float) -> None:
    x = torch.ones(2, 32)
    x[1, 20] = bad
    with interpreted(nvfp4_pack, tile):
        _, block_scales = nvfp4_pack.nvfp4_pack(x, torch.tensor(1 / 2688))
    expected = torch.nan if bad != bad else 448.0
    assert block_scales.float()[1, 1].isnan() if bad != bad else block_scales.float()[1, 1] == expected
    assert block_scales.float().isfinite().sum() == 4 - (bad != bad)


def test_a_row_that_is_not_a_multiple_of_16_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"K a multiple of 16, got \(2, 24\).*pad K"):
        nvfp4_pack.nvfp4_pack(torch.zeros(2, 24), torch.ones(()))
    codes, block_scales = nvfp4_pack.nvfp4_pack(torch.zeros(0, 32), torch.ones(()))
    assert codes.shape == (0, 16) and block_scales.shape == (0, 2)
