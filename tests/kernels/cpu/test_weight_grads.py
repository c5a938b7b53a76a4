"""Products of gradients with packed weights on the CPU against FP64, for every instruction set that can run here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from instruction_sets import RUNNABLE, using
from torch import Tensor

from fp8_compile import quantize_nvfp4
from fp8_compile.kernels import experts, fp8_weight
from fp8_compile.kernels.nvfp4 import ops

SHAPES = [(1, 40, 300), (3, 33, 65), (4, 5, 7), (5, 70, 130), (40, 37, 600), (130, 300, 72), (0, 4, 8)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


Product = Callable[[Tensor], Tensor]


def nvfp4(n: int, k: int) -> tuple[Product, Tensor]:
    """The product from the packed form, and the weight in FP64."""
    weight = quantize_nvfp4(torch.randn(n, k) * torch.logspace(-1, 1, n)[:, None], "rtn")
    codes, block_scales = ops.from_standard(weight.codes, weight.block_scales, ops.INTERLEAVED)
    parts = codes, block_scales, weight.global_scale, k
    return lambda grad: ops.mm_grad_op(grad, *parts, ops.INTERLEAVED), weight.dequantize(torch.float64)


def fp8(n: int, k: int) -> tuple[Product, Tensor]:
    weight = fp8_weight.quantize(torch.randn(n, k) * torch.logspace(-3, 3, n)[:, None])
    return lambda grad: fp8_weight.mm_grad_op(grad, *weight), weight.codes.double() * weight.scales.double()[:, None]


@pytest.mark.parametrize("make", [nvfp4, fp8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_products_are_exact_but_for_the_sum(kernels: str, m: int, n: int, k: int, dtype: torch.dtype, make) -> None:
    multiply, weight = make(n, k)
    grad = torch.randn(m, n).to(dtype)
    out, exact = multiply(grad), grad.double() @ weight
    size = grad.double().abs() @ weight.abs()
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2 * exact.abs() * 1.01
    # In FP8 scales vary along the sum, so bf16 instructions get products of grad and scale that are rounded to bf16.
    most = torch.finfo(dtype).eps / 2 if make is fp8 and dtype == torch.bfloat16 else 1e-6
    assert out.dtype == dtype and out.shape == (m, k)
    assert ((out.double() - exact).abs() <= most * size + rounding + 1e-7).all()


@pytest.mark.parametrize("make", [nvfp4, fp8])
def test_inf_and_nan_reach_the_rows_that_have_them(kernels: str, make) -> None:
    multiply, _ = make(40, 70)
    for dtype in DTYPES:
        grad = torch.randn(20, 40).to(dtype)
        grad[1, 39] = math.inf
        out = multiply(grad)
        assert not out[1].isfinite().all() and out[0].isfinite().all()


@pytest.mark.parametrize("make", [nvfp4, fp8])
def test_strided_gradients_are_the_same(make) -> None:
    multiply, _ = make(64, 48)
    wide = torch.randn(9, 128)
    for rows in (wide[:, :64], wide[:, ::2], wide.t()[:64].t()):
        assert torch.equal(multiply(rows), multiply(rows.contiguous()))


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
@pytest.mark.parametrize("rows", [1, 7, 70])
def test_every_row_is_multiplied_by_its_own_expert(rows: int, format: str) -> None:
    count, n, k = 3, 40, 72
    grad, which = torch.randn(rows, n), torch.randint(0, count, (rows,))
    ends = torch.bincount(which, minlength=count).cumsum(0).to(torch.int32)
    matrices = [torch.randn(n, k) * 2.0**expert for expert in range(count)]
    if format == "nvfp4":
        quantized = [quantize_nvfp4(one, "rtn") for one in matrices]
        codes, block_scales, scales = (
            torch.stack([getattr(one, part) for one in quantized]) for part in ("codes", "block_scales", "global_scale")
        )
        parts = *ops.from_standard(codes, block_scales, ops.INTERLEAVED), scales
        weight = torch.stack([one.dequantize(torch.float64) for one in quantized])
    else:
        codes, scales = (torch.stack(part) for part in zip(*(fp8_weight.quantize(one) for one in matrices)))
        parts, weight = (codes, scales), codes.double() * scales.double()[..., None]
    for kind, index, own in (("gathered", which, which), ("grouped", ends, which.sort().values)):
        if format == "nvfp4":
            out = experts.nvfp4_mm_grad_op(grad, *parts, index, kind, k, ops.INTERLEAVED)
        else:
            out = experts.fp8_mm_grad_op(grad, *parts, index, kind)
        expected = torch.einsum("mn,mnk->mk", grad.double(), weight[own])
        assert (out - expected).norm() <= 1e-6 * expected.norm()
