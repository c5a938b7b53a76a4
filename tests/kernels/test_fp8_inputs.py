"""Inputs in FP8: the formula against values worked out here, Inf and NaN, and the C++ against the formula."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from instruction_sets import RUNNABLE, using

from fp8_compile.kernels import fp8_inputs as plain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


def test_a_known_scale_is_taken_and_a_row_has_its_own() -> None:
    x = torch.tensor([[1.0, -2.0, 0.3, 0.0], [100.0, 3.0, -1.0, 224.0]])
    q, scale = plain.quantize_inputs(x, torch.tensor(0.25))
    assert q.float().tolist() == [[4.0, -8.0, 1.25, 0.0], [384.0, 12.0, -4.0, 448.0]] and scale.tolist() == [[0.25]]
    q, scale = plain.quantize_inputs(x, None)
    assert q.float().tolist() == [[224.0, -448.0, 64.0, 0.0], [192.0, 6.0, -2.0, 448.0]]
    torch.testing.assert_close(scale, torch.tensor([[2 / 448], [0.5]]))
    rounded = plain.round_inputs(x.bfloat16(), torch.tensor(0.25))
    assert rounded.dtype == torch.bfloat16 and rounded.tolist() == [[1.0, -2.0, 0.3125, 0.0], [96.0, 3.0, -1.0, 112.0]]
    y = torch.ones(2, 4, requires_grad=True)
    torch.ops.fp8_compile.round_inputs(y, None).sum().backward()
    assert torch.equal(y.grad, torch.ones(2, 4)), "gradients go through"


@pytest.mark.parametrize("scale", [None, 0.02])
def test_inf_and_nan_are_nan_in_their_rows_and_nowhere_else(scale: float | None) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.ones(3, 40)
        x[1, 7] = bad
        known = None if scale is None else torch.tensor(scale)
        for function in (plain.quantize_inputs, plain.quantize_inputs_op):
            q, dequant_scale = function(x, known)
            y = (q.float() * dequant_scale).sum(1)
            assert y[1].isnan() and y[[0, 2]].isfinite().all(), (bad, function)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_gives_the_formulas_bits(kernels: str, dtype: torch.dtype) -> None:
    wide = torch.randn(70, 2 * 5003).to(dtype)
    wide[3] = 0
    wide[4] *= 1e-4
    for x in (wide[:, :5003], wide[:1, :17], wide[:, ::2], wide[:0], wide[:3, :0], wide.t()[:9]):
        for scale in (None, torch.tensor(0.004)):
            found, expected = plain.quantize_inputs_op(x, scale), plain.quantize_inputs(x, scale)
            for one, other in zip(found, expected):
                assert one.shape == other.shape and one.dtype == other.dtype and one.is_contiguous()
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (x.shape, scale)


def test_threads_change_nothing_and_without_a_compiler_it_is_the_formula() -> None:
    x, before, found = torch.randn(64, 4096), torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(torch.ops.fp8_compile.quantize_inputs(x, None))
    finally:
        torch.set_num_threads(before)
    for one, two, three in zip(*found, torch.ops.fp8_compile.quantize_inputs_formula(x, None)):
        assert torch.equal(one.float(), two.float()) and torch.equal(one.float(), three.float())
