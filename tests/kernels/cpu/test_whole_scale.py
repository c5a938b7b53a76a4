"""The C++ of the scale of a whole tensor against the plain formulas, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp8_compile.kernels.cpu.quantize import whole_scale, whole_scale_op
from fp8_compile.kernels.delayed_scaling import first_scale
from fp8_compile.kernels.nvfp4_training import LARGEST, global_scale
from fp8_compile.kernels.quantize import block_amax

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")


def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.int32), expected.view(torch.int32)) or bool(
        found.isnan().all() and expected.isnan().all()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(33, 77), (1, 1), (3, 4097), (0, 16), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e4, 0.0])
def test_is_bit_equal_to_the_formula(shape, dtype, magnitude) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * magnitude).to(dtype)
    matrix = x.reshape(1, -1)
    if x.numel():
        enc, dequant = global_scale(matrix)
        for found, expected in zip(whole_scale_op(x, None, LARGEST), (enc, dequant, block_amax(matrix, (-1, -1)))):
            assert found.shape == (1, 1) and equal(found, expected)
    for known in (0.0, 0.02, 3.0):
        given = torch.full((1, 1), known)
        results = whole_scale_op(x, given, LARGEST)
        for found, expected in zip(results, whole_scale(x, given, LARGEST)):
            assert equal(found, expected), known
        if x.numel():
            assert equal(results[0], first_scale(given, block_amax(matrix, (-1, -1)), LARGEST))


@pytest.mark.parametrize("worst", [INF, -INF, NAN], ids=str)
def test_a_tensor_that_is_not_finite_has_the_scale_of_one_and_says_what_its_amax_is(worst) -> None:
    x = torch.randn(5, 40)
    x[2, 7] = worst
    scale, inverse, amax = whole_scale_op(x, None, LARGEST)
    assert scale.item() == inverse.item() == 1.0
    assert amax.isnan() if worst != worst else amax.item() == INF
    assert whole_scale_op(x, torch.full((1, 1), 2.0), LARGEST)[0].item() == 2.0


def test_columns_of_a_matrix_are_read_where_they_are() -> None:
    x = torch.arange(48.0).reshape(6, 8)
    assert whole_scale_op(x.t()[:3], None, LARGEST)[2].item() == 42.0
