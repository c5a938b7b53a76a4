"""nvfp4_grad and fp8_weight_grad against their references, in the interpreter. Code for GPUs: test_nvfp4_matmul.py."""

from __future__ import annotations

import pytest
import torch
from interpreted import interpreted

from fp8_compile import quantize_nvfp4
from fp8_compile.kernels import fp8_weight
from fp8_compile.kernels.gpu import fp8_weight_grad, nvfp4_grad, nvfp4_product
from fp8_compile.kernels.nvfp4 import ops

SHAPES = [(1, 40, 32), (5, 33, 200), (40, 70, 144)]
# Of the dtype's own rounding of the result; FP8 rounds the scaled gradient, too.
BUDGET = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_nvfp4_gradient_is_as_near_the_reference_as_its_dtype_is(m, n, k, dtype) -> None:
    weight = quantize_nvfp4(torch.randn(n, k) * 0.1)
    parts = weight.codes, weight.block_scales, weight.global_scale
    grad = torch.randn(m, 2 * n)[:, ::2].to(dtype) if m == 1 else torch.randn(m, n).to(dtype)
    with interpreted(nvfp4_grad):
        out = nvfp4_product.gradient(grad, *parts, k, ops.STANDARD)
    exact = ops.reference_grad(grad.double(), *parts, k, ops.STANDARD)
    assert out.dtype == dtype and out.shape == (m, k)
    assert (out.double() - exact).norm() / exact.norm() < BUDGET[dtype]


@pytest.mark.parametrize("dtype", BUDGET, ids=str)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_fp8_gradient_is_as_near_the_reference_as_its_dtype_is(m, n, k, dtype) -> None:
    weight = fp8_weight.quantize(torch.randn(n, k) * 0.1)
    grad = torch.randn(m, n).to(dtype)
    with interpreted(fp8_weight_grad):
        out = fp8_weight_grad.gradient(grad, *weight)
    exact = grad.double() @ weight.dequantize(torch.float64)
    assert out.dtype == dtype and out.shape == (m, k)
    assert (out.double() - exact).norm() / exact.norm() < BUDGET[dtype]
