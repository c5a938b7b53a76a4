"""Products with FP8 weights on the CPU against FP64, for every instruction set that this machine can run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from instruction_sets import RUNNABLE, using

from fp8_compile.kernels import fp8_weight as plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


def given(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(m, k).to(dtype)
    codes, scales = plain.quantize(torch.randn(n, k) * torch.logspace(-3, 3, n)[:, None])
    return x, codes, scales, torch.randn(n).to(dtype)


def check(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, codes, scales, bias = given(m, n, k, dtype)
    for added in (None, bias):
        y = plain.mm_op(x, codes, scales, added)
        exact = (x.double() @ codes.double().t()) * scales.double() + (0 if added is None else added.double())
        size = (x.double().abs() @ codes.double().abs().t()) * scales.double() + 1e-30
        rounding = torch.finfo(dtype).eps / 2 * exact.abs() if dtype != torch.float32 else 0
        assert y.dtype == dtype and ((y.double() - exact).abs() <= 1e-6 * size + rounding * 1.01 + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m, n, k", [(1, 40, 300), (3, 33, 65), (4, 5, 7), (5, 70, 130), (40, 37, 600), (0, 4, 8)])
def test_products_are_exact_but_for_the_sum(kernels: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    check(m, n, k, dtype)


@pytest.mark.parametrize("m", [2, 20])
def test_inf_and_nan_reach_the_rows_that_have_them(kernels: str, m: int) -> None:
    for dtype in DTYPES:
        x, codes, scales, _ = given(m, 40, 70, dtype)
        x[1, 69] = math.inf
        y = plain.mm_op(x, codes, scales, None)
        assert not y[1].isfinite().all() and y[0].isfinite().all()


def test_strided_rows_and_the_op_itself() -> None:
    x, codes, scales, bias = given(9, 40, 64, torch.bfloat16)
    wide = torch.randn(9, 128).bfloat16()
    for rows in (x, wide[:, :64], wide[:, ::2], wide.t()[:64].t()):
        found = torch.ops.fp8_compile.fp8_mm(rows, codes, scales, bias)
        torch.testing.assert_close(found, plain.product(rows, codes, scales, bias), rtol=0.02, atol=0.02)
        assert torch.equal(found, plain.mm_op(rows.contiguous(), codes, scales, bias))


def test_results_do_not_depend_on_threads_and_without_a_compiler_it_is_the_formula() -> None:
    x, codes, scales, bias = given(30, 200, 300, torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(plain.mm_op(x, codes, scales, bias))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    without = torch.ops.fp8_compile.fp8_mm_formula(x, codes, scales, bias)
    assert torch.equal(without, plain.product(x, codes, scales, bias))


def test_what_there_is_no_kernel_for_is_the_formula() -> None:
    x, codes, scales, bias = given(5, 40, 64, torch.float32)
    for rows, weight in ((x.double(), codes), (x, codes.to(torch.float8_e5m2))):
        assert torch.equal(plain.mm_op(rows, weight, scales, bias), plain.product(rows, weight, scales, bias))
