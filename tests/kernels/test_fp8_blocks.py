"""FP8 by blocks of 128 x 128."""

from __future__ import annotations

import pytest
import torch

from fp8_compile.kernels import fp8_blocks


@pytest.mark.parametrize(("n", "k"), [(128, 256), (130, 300), (1, 16), (40, 129)])
def test_each_block_has_the_scale_of_its_largest_weight(n: int, k: int) -> None:
    w = torch.randn(n, k) * torch.rand(n, 1).exp2()
    w[:, : k // 2] = 0 if n == 40 else w[:, : k // 2]
    quantized = fp8_blocks.quantize(w)
    again = quantized.dequantize()
    for row in range(0, n, 128):
        for column in range(0, k, 128):
            block = w[row : row + 128, column : column + 128]
            scale = float(quantized.scales[row // 128, column // 128])
            assert scale == pytest.approx(float(block.abs().max()) / 448 or 1.0, rel=1e-6)
            error = (again[row : row + 128, column : column + 128] - block).abs()
            # Half a step of E4M3: 2 ** -4 of the value, or half of the smallest subnormal.
            assert bool((error <= torch.maximum(block.abs() * 2.0**-4, torch.tensor(scale * 2.0**-10))).all())


def test_a_stack_is_dequantized_matrix_by_matrix() -> None:
    matrices = [fp8_blocks.quantize(torch.randn(130, 140)) for _ in range(3)]
    codes, scales = (torch.stack(parts) for parts in zip(*matrices))
    whole = fp8_blocks.dequantize_op(codes, scales, torch.bfloat16)
    for one, matrix in zip(whole, matrices):
        assert torch.equal(one, matrix.dequantize(torch.bfloat16))


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="layer: weights are Inf or NaN"):
        fp8_blocks.quantize(torch.full((4, 4), torch.inf), "layer")
