"""A gemm that quantizes its operands against the calls that it stands for, bit for bit."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fp8_compile.kernels.cpu.quantize import quantize_delayed_op
from fp8_compile.kernels.cpu.quantize_mm import quantize_delayed_mm_op, quantize_mm_op
from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op
from fp8_compile.kernels.formats import E4M3, E5M2
from fp8_compile.kernels.fp8_inputs import quantize_inputs_op
from fp8_compile.kernels.quantize import quantize_op

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 5, 16), (4, 33, 130), (5, 40, 64), (70, 16, 300), (0, 3, 8), (3, 0, 8), (3, 4, 0)]


def three_calls(
    x: Tensor, scale: Tensor | None, w: Tensor, weight_scale: Tensor | None, bias: Tensor | None, e5m2: bool, rows: bool
) -> Tensor:
    dtype = E5M2.dtype if e5m2 else E4M3.dtype
    block = [1 if rows else -1, -1]
    q, s = quantize_op(x, dtype, block) if scale is None else quantize_inputs_op(x, scale)
    if weight_scale is None:
        w, by_row = quantize_op(w, dtype, block)
        weight_scale = by_row.t()
    return scaled_mm_op(q, w.t(), s, weight_scale, bias, x.dtype)


def check(*given: object) -> Tensor:
    found, expected = quantize_mm_op(*given), three_calls(*given)
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.is_contiguous()
    assert torch.equal(found.nan_to_num(nan=123.0), expected.nan_to_num(nan=123.0))
    return found


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_both_operands_by_scales_of_their_own(m: int, n: int, k: int, rows: bool) -> None:
    for dtype, e5m2 in itertools.product(DTYPES, (False, True)):
        x, w, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
        for added in (None, bias):
            check(x, None, w, None, added, e5m2, rows)


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_codes_of_a_weight_by_scales_that_are_known(m: int, n: int, k: int) -> None:
    x, codes, scale = torch.randn(m, k), torch.randn(n, k).to(E5M2.dtype), torch.tensor(0.02)
    for rows, weight_scale in itertools.product((False, True), (torch.rand(1, 1), torch.rand(1, n))):
        check(x, None, codes, weight_scale, torch.randn(n), False, rows)
        check(x, scale, codes, weight_scale, None, False, rows)


@pytest.mark.parametrize("scale", [0.0, 3.0, 1e4])
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_a_delayed_quantize_gives_its_amax_too(m: int, n: int, k: int, scale: float) -> None:
    for dtype, format in itertools.product(DTYPES, (E4M3, E5M2)):
        x, w, known = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.full((1, 1), scale)
        codes, _, dequant_scale, expected_amax = quantize_delayed_op(x, known, format.dtype, True)
        quantized = quantize_op(w, format.dtype, [-1, -1])
        for weight, weight_scale in ((w, None), (quantized[0], quantized[1])):
            given = (x, known, weight, weight_scale, None, format is E5M2)
            y, amax = quantize_delayed_mm_op(*given)
            expected = scaled_mm_op(codes, quantized[0].t(), dequant_scale, quantized[1], None, dtype)
            assert torch.equal(y, expected) and torch.equal(amax, expected_amax)
            without = torch.ops.fp8_compile.quantize_delayed_mm_formula(*given)
            torch.testing.assert_close(without, (y, amax), rtol=0.02, atol=0.1)
        assert float(known) == pytest.approx(scale), "the state itself is not written"


def test_operands_of_any_strides() -> None:
    x, w = torch.randn(9, 128), torch.randn(70, 256)
    rows = (x[:, :64], x[:, ::2], x.t()[:64].t(), x[::2, :64])
    weights = (w[:, :64], w[:, ::4], w.t()[:64].t())
    for left, right in itertools.product(rows, weights):
        check(left, None, right, None, None, False, True)
        check(left, torch.tensor(0.5), right.to(E4M3.dtype), torch.ones(1, 70), None, False, False)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_do_not_vanish(bad: float) -> None:
    x, w = torch.randn(4, 32), torch.randn(8, 32)
    x[1, 3] = bad
    by_row = check(x, None, w, None, None, False, True)
    assert by_row[1].isnan().all() and by_row[[0, 2, 3]].isfinite().all()
    assert check(x, None, w, None, None, False, False).isnan().all()
    known = check(x, torch.tensor(0.1), w, None, None, False, True)
    assert known[1].isnan().all() and known[[0, 2, 3]].isfinite().all()


def test_without_a_compiler_it_is_the_plain_formula() -> None:
    x, w, scale = torch.randn(4, 32), torch.randn(8, 32), torch.tensor(0.02)
    for known, rows in itertools.product((None, scale), (False, True)):
        given = (x, known, w, None, torch.randn(8), False, rows)
        torch.testing.assert_close(torch.ops.fp8_compile.quantize_mm_formula(*given), quantize_mm_op(*given))


def test_the_op_and_its_fake_agree() -> None:
    given = (torch.randn(4, 32), None, torch.randn(8, 32), None, torch.randn(8), False, True)
    torch.library.opcheck(quantize_mm_op, given, test_utils=("test_schema", "test_faketensor"))
