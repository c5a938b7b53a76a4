"""NVFP4 weights on the CPU: their layout, and products against FP64 and against plain-PyTorch references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_compile.kernels.cpu import nvfp4


def random_weight(n: int, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Any codes, any finite positive block scales, in plain order."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, generator=generator)
    return codes, scales.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("n, k", [(16, 16), (48, 64), (37, 48), (5, 32), (1, 16), (0, 16), (3, 0)])
def test_interleaving_moves_words_of_a_group_together_and_back(n: int, k: int, generator: torch.Generator) -> None:
    codes, scales = random_weight(n, k, generator)
    laid_codes, laid_scales = nvfp4.interleave(codes, scales)
    assert (laid_codes.shape, laid_codes.dtype) == (codes.shape, codes.dtype)
    assert (laid_scales.shape, laid_scales.dtype) == (scales.shape, scales.dtype)
    back_codes, back_scales = nvfp4.deinterleave(laid_codes, laid_scales)
    assert torch.equal(back_codes, codes)
    assert torch.equal(back_scales.view(torch.uint8), scales.view(torch.uint8))
    flat_codes, flat_scales = laid_codes.flatten(), laid_scales.view(torch.uint8).flatten()
    for row in range(n):  # the documented place of each byte, counted by hand
        first, size = row // 16 * 16, min(16, n - row // 16 * 16)
        for byte in range(k // 2):
            place = first * k // 2 + (byte // 4 * size + row - first) * 4 + byte % 4
            assert flat_codes[place] == codes[row, byte]
        for block in range(k // 16):
            place = first * k // 16 + block * size + row - first
            assert flat_scales[place] == scales.view(torch.uint8)[row, block]


def test_a_weight_of_the_wrong_dtype_or_shape_is_refused(generator: torch.Generator) -> None:
    codes, scales = random_weight(16, 32, generator)
    with pytest.raises(TypeError, match="float8_e4m3fn, got torch.uint8 and torch.float32"):
        nvfp4.interleave(codes, scales.float())
    with pytest.raises(ValueError, match="pad K"):
        nvfp4.interleave(codes[:, :12], scales)
