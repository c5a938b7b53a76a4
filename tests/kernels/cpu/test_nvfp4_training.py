"""NVFP4 of training in C++ against the formula and FP64, for every instruction set that this machine can run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from instruction_sets import RUNNABLE, using
from torch import Tensor

from fp8_compile.kernels import nvfp4_training as nvfp4
from fp8_compile.kernels.quantize import spread

SEED = torch.tensor([123456789012345])


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


def with_extremes(x: Tensor) -> Tensor:
    y = x.clone()
    y[0, 3], y[-1, 1], y[5, 5] = torch.inf, torch.nan, -torch.inf
    y[2] *= 1e-38
    y[3] *= 1e30
    y[6] = -0.0
    return y


def check(x: Tensor, block, transpose: bool, rotated: bool, seed: Tensor | None, four_over_six: bool) -> None:
    """The same bytes. Of a block whose scale is NaN the codes do not matter."""
    largest = float(x.float().nan_to_num(0, 0, 0).abs().amax()) if x.numel() else 1.0
    enc = torch.full((1, 1), 1536.0 / max(largest, 1e-3))
    arguments = (x, enc, block, transpose, rotated, seed, 3, four_over_six)
    codes, scales = nvfp4.quantize_nvfp4_op(*arguments)
    expected, expected_scales = nvfp4.quantize_nvfp4(*arguments)
    assert codes.shape == expected.shape and scales.shape == expected_scales.shape
    nan = expected_scales.float().isnan()
    assert torch.equal(scales.float().isnan(), nan)
    assert torch.equal(scales.view(torch.uint8)[~nan], expected_scales.view(torch.uint8)[~nan])
    known = ~spread(nan, torch.Size((codes.shape[0], 2 * codes.shape[1])), block)[:, ::2]
    assert torch.equal(codes[known], expected[known])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantizes_are_the_formula_s_bits(kernels: str, dtype: torch.dtype, generator) -> None:
    inputs = [torch.randn(shape, generator=generator) for shape in ((1, 1), (7, 33), (40, 70))]
    for x in (*inputs, with_extremes(inputs[2]), torch.zeros(0, 20), torch.zeros(20, 0)):
        for block, *flags, seed, both in itertools.product(
            nvfp4.BLOCKS, (False, True), (False, True), (None, SEED), (False, True)
        ):
            check(x.to(dtype), block, *flags, seed, both)


def test_strides_and_threads_change_nothing(generator) -> None:
    x, before = torch.randn(300, 520, generator=generator), torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for given, transpose in itertools.product((x, x.t(), x[::2, ::3], x[5:, 7:]), (False, True)):
                check(given, (1, 16), transpose, True, SEED, False)
    finally:
        torch.set_num_threads(before)


def test_counters_beyond_32_bits_are_the_formula_s() -> None:
    """Element 2**34 and on has a counter of more than 32 bits; no matrix of a test is that large."""
    elements = torch.tensor([2**32 - 1, 2**32, 2**40 + 5])
    low = nvfp4._philox_words(SEED[0], elements & 0xFFFFFFFF, 1)
    words = nvfp4._philox_words(SEED[0], elements, 1)
    assert torch.equal(words[0][:1], low[0][:1]) and (words[0][1:] != low[0][1:]).all()


@pytest.mark.parametrize("m, n, k", [(1, 1, 16), (5, 31, 48), (13, 70, 96), (40, 33, 2080), (130, 260, 512)])
def test_products_are_exact_but_for_the_sum(kernels: str, m: int, n: int, k: int, generator) -> None:
    enc, dequant, bias = torch.full((1, 1), 500.0), torch.full((1, 1), 0.3), torch.randn(n, generator=generator)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    for blocks in itertools.product(nvfp4.BLOCKS, nvfp4.BLOCKS):
        left, right = (
            nvfp4.quantize_nvfp4(one, enc, block, False, False, None, 0, False) for one, block in zip((x, w), blocks)
        )
        exact = nvfp4.dequantize_nvfp4(*left).double() @ nvfp4.dequantize_nvfp4(*right).double().t()
        exact = exact * (dequant * dequant).double() + bias
        for codes, scales in (left, (left[0].t().contiguous().t(), left[1].t().contiguous().t())):
            y = nvfp4.nvfp4_train_mm_op(codes, right[0], scales, right[1], dequant, dequant, bias, torch.float32)
            assert (y - exact).norm() <= 1e-6 * exact.norm()


def test_a_nan_scale_reaches_its_row_even_of_zeros(kernels: str) -> None:
    codes, scales, one = torch.zeros(20, 16, dtype=torch.uint8), torch.ones(20, 2), torch.ones(1, 1)
    bad = scales.clone()
    bad[3, 1] = torch.nan
    left, right = bad.to(torch.float8_e4m3fn), scales.to(torch.float8_e4m3fn)
    y = nvfp4.nvfp4_train_mm_op(codes, codes, left, right, one, one, None, torch.float32)
    assert torch.equal(y.isnan().all(1), torch.arange(20) == 3) and (y[:3] == 0).all()


def test_the_ops_and_their_fakes_agree() -> None:
    x, one = torch.randn(20, 40), torch.ones(1, 1)
    for arguments in ((x, one, [1, 16], True, True, SEED, 1, False), (x, one, [16, 16], False, False, None, 0, True)):
        torch.library.opcheck(nvfp4.quantize_nvfp4_op, arguments, test_utils=("test_faketensor",))
    codes, scales = nvfp4.quantize_nvfp4_op(x, one, [1, 16], False, False, None, 0, False)
    product = (codes, codes, scales, scales, one, one, None, torch.bfloat16)
    torch.library.opcheck(nvfp4.nvfp4_train_mm_op, product, test_utils=("test_faketensor",))
