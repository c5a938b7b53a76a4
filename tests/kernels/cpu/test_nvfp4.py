"""NVFP4 weights on the CPU: their layout, and products against FP64 and against plain-PyTorch references."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator

import pytest
import torch
from instruction_sets import RUNNABLE, using
from torch import Tensor

from fp8_compile.kernels.cpu import nvfp4

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Products are exact and sums are FP32; then y is rounded to x's dtype once.
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SUMMING = 1e-6
GLOBAL_SCALE = 0.37e-2


@pytest.fixture(params=RUNNABLE)
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


def random_weight(n: int, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Any codes, any finite positive block scales, in plain order."""
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8, generator=generator)
    return codes, scales.view(torch.float8_e4m3fn)


def error(y: Tensor, expected: Tensor) -> float:
    """Normwise."""
    return float((y.double() - expected).norm() / expected.norm().clamp(min=1e-300))


@dataclasses.dataclass
class Case:
    x: Tensor
    weight: tuple[Tensor, Tensor]
    bias: Tensor
    activations: str | None
    expected: Tensor  # FP64, without the bias

    def check(self, m: int, bias: Tensor | None = None) -> None:
        y = nvfp4.matmul(self.x[:m], *self.weight, GLOBAL_SCALE, bias, self.activations)
        assert (y.shape, y.dtype) == ((m, self.expected.shape[1]), self.x.dtype)
        expected = self.expected[:m] if bias is None else self.expected[:m] + bias.double()
        assert error(y, expected) < SUMMING + ROUNDING[self.x.dtype], (
            self.weight[0].shape,
            m,
            y.dtype,
            self.activations,
        )


@functools.cache
def cases() -> list[Case]:
    """Computed once for all instruction sets."""
    generator, made = torch.Generator().manual_seed(1), []
    for n, k, short in ((48, 64, 0), (37, 1040, 5), (5, 32, 15), (130, 528, 0)):
        weight = nvfp4.interleave(*random_weight(n, k, generator))
        for dtype in DTYPES:
            x = torch.randn(45, k - short, generator=generator).to(dtype)
            bias = torch.randn(n, generator=generator).to(dtype)
            for activations in (None, "int8"):
                expected = nvfp4.reference(x, *weight, GLOBAL_SCALE, None, activations)
                made.append(Case(x, weight, bias, activations, expected))
    return made


@functools.cache
def long_cases() -> list[Case]:
    generator = torch.Generator().manual_seed(2)
    weight = nvfp4.interleave(*random_weight(16, 14336, generator))
    x = torch.rand(20, 14336, generator=generator)  # of one sign: sums grow
    results = {
        activations: nvfp4.reference(x, *weight, GLOBAL_SCALE, None, activations) for activations in (None, "int8")
    }
    return [Case(x, weight, torch.zeros(16), activations, expected) for activations, expected in results.items()]


def test_products_are_exact_and_summed_in_fp32(instructions: str) -> None:
    for case in cases():
        for m in (1, 2, 3, 4, 7, 8, 16, 17, 45):
            case.check(m, case.bias if m % 2 else None)


def test_long_sums_keep_their_precision(instructions: str) -> None:
    for case in long_cases():
        for m in (1, 4, 16, 20):
            case.check(m)


def test_one_row_of_int8_is_bit_equal_to_that_row_among_others(instructions: str, generator: torch.Generator) -> None:
    """One row takes four blocks at once where their scales are ordinary: negative and NaN ones go the other way."""
    codes, scales = random_weight(40, 16 * 23, generator)
    scales.view(torch.uint8)[3, 5], scales.view(torch.uint8)[20, 17] = 0x7F, 0xB8
    weight, x = nvfp4.interleave(codes, scales), torch.randn(2, 16 * 23, generator=generator)
    alone = nvfp4.matmul(x[:1], *weight, GLOBAL_SCALE, None, "int8")
    both = nvfp4.matmul(x, *weight, GLOBAL_SCALE, None, "int8")
    assert torch.equal(alone[0].view(torch.int32), both[0].view(torch.int32))
    assert alone[0].isnan().nonzero().tolist() == [[3]]


def test_every_code_times_every_scale_is_decoded_exactly(instructions: str) -> None:
    """One element of K at a time: y is the weight itself. Subnormal, zero, negative and NaN scales among them."""
    scales = torch.arange(256, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)  # a row each
    codes = (torch.arange(8, dtype=torch.uint8) * 0x22 + 0x10).expand(256, 8)  # nibble j of the row is code j
    assert nvfp4.dequantize(codes[:1], torch.ones(1, 1).to(scales.dtype), 1.0)[0].abs().unique().numel() == 8
    weight = nvfp4.interleave(codes, scales)
    expected = nvfp4.dequantize(codes, scales, GLOBAL_SCALE).t()
    for rows in (range(1), range(2, 4), range(4, 8), range(8, 16), range(16)):
        for x in (torch.eye(16), torch.eye(16).repeat(2, 1)):  # few rows and many
            for dtype in (torch.float32, torch.bfloat16):
                picked = x if x.shape[0] > 16 else x[list(rows)]
                y = nvfp4.matmul(picked.to(dtype), *weight, GLOBAL_SCALE)
                target = (expected.repeat(2, 1) if x.shape[0] > 16 else expected[list(rows)]).float().to(dtype)
                assert torch.equal(y.nan_to_num(7e7), target.nan_to_num(7e7))


def test_activations_are_quantized_as_documented(instructions: str, generator: torch.Generator) -> None:
    """A weight that is the identity shows q * scale, ties, tiny and huge blocks included."""
    plain = torch.zeros(16, 8, dtype=torch.uint8)
    for k in range(16):
        plain[k, k // 2] = 2 << 4 * (k % 2)  # 1.0
    weight = nvfp4.interleave(plain, torch.ones(16, 1).to(torch.float8_e4m3fn))
    x = torch.randn(64, 16, generator=generator) * 2.0 ** torch.randint(-140, 120, (64, 1), generator=generator)
    ties = torch.arange(16) + 0.5
    ties[15] = 127.0
    x = torch.cat([x, ties[None], -ties[None], torch.zeros(1, 16), torch.full((1, 16), 1e-42)])
    q, scales = nvfp4.quantize_activations(x)
    assert q.abs().amax() == 127 and q[64].tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14, 127]
    close = (q * scales - x).abs() <= 0.5001 * scales
    assert close[scales[:, 0] >= 2.0**-126].all() and not q[scales[:, 0] < 2.0**-126].any()
    for row in (0, 5):  # one row at a time, and all
        assert torch.equal(nvfp4.matmul(x[row : row + 1], *weight, 1.0, None, "int8"), (q * scales)[row : row + 1])
    assert torch.equal(nvfp4.matmul(x, *weight, 1.0, None, "int8"), q * scales)


def test_infinities_and_nans_reach_the_result(instructions: str, generator: torch.Generator) -> None:
    weight = nvfp4.interleave(*random_weight(40, 96, generator))
    for special in (math.inf, -math.inf, math.nan):
        for m in (1, 3, 16, 30):
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.randn(m, 90, generator=generator).to(dtype)
                x[m - 1, 77] = special
                clean = nvfp4.reference(x[: m - 1], *weight, GLOBAL_SCALE)
                for activations in (None, "int8"):
                    y = nvfp4.matmul(x, *weight, GLOBAL_SCALE, None, activations)
                    expected = nvfp4.reference(x, *weight, GLOBAL_SCALE, None, activations)
                    assert not y[m - 1].isfinite().any()
                    assert torch.equal(y[m - 1].isnan(), expected[m - 1].isnan())
                    assert y[: m - 1].isfinite().all()
                    assert m == 1 or activations or error(y[: m - 1], clean) < SUMMING + ROUNDING[dtype]


def test_zeros_strides_and_empty_matrices(instructions: str, generator: torch.Generator) -> None:
    weight = nvfp4.interleave(*random_weight(33, 64, generator))
    base = torch.randn(40, 130, generator=generator)
    tall = torch.randn(64, 20, generator=generator)
    for x in (base[:3, :64], base[::7, 1:65], tall.t(), base[:, ::2][:, :64], base[:1, :64].expand(5, 64)):
        for activations in (None, "int8"):
            y = nvfp4.matmul(x, *weight, GLOBAL_SCALE, None, activations)
            assert torch.equal(y, nvfp4.matmul(x.contiguous(), *weight, GLOBAL_SCALE, None, activations))
    assert nvfp4.matmul(base[:0, :64], *weight, GLOBAL_SCALE).shape == (0, 33)
    assert not nvfp4.matmul(torch.zeros(2, 64), *weight, GLOBAL_SCALE, None, "int8").any()
    empty = nvfp4.interleave(*random_weight(0, 64, generator))
    assert nvfp4.matmul(base[:2, :64], *empty, GLOBAL_SCALE).shape == (2, 0)
    no_k = nvfp4.interleave(*random_weight(5, 0, generator))
    assert torch.equal(nvfp4.matmul(base[:2, :0], *no_k, GLOBAL_SCALE, base[0, :5]), base[:1, :5].expand(2, 5))
    zeros = nvfp4.interleave(torch.zeros(20, 32, dtype=torch.uint8), torch.zeros(20, 4).to(torch.float8_e4m3fn))
    assert not nvfp4.matmul(base[:2, :64], *zeros, GLOBAL_SCALE).any()


@pytest.fixture
def thread_counts() -> Iterator[tuple[int, ...]]:
    before = torch.get_num_threads()
    yield (1, 2, 3)
    torch.set_num_threads(before)


def test_results_do_not_depend_on_the_number_of_threads(
    instructions: str, thread_counts: tuple[int, ...], generator: torch.Generator
) -> None:
    """Three threads share one row: each has at least 2**16 products (``kernels.h``)."""
    weight = nvfp4.interleave(*random_weight(150, 1040, generator))
    for m in (1, 2, 16, 60):
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(m, 1040, generator=generator).to(dtype)
            for activations in (None, "int8"):
                results = []
                for threads in thread_counts:
                    torch.set_num_threads(threads)
                    results.append(nvfp4.matmul(x, *weight, GLOBAL_SCALE, None, activations))
                assert all(torch.equal(results[0], other) for other in results[1:])


def test_without_a_compiler_the_reference_answers(generator: torch.Generator) -> None:
    weight = nvfp4.interleave(*random_weight(20, 32, generator))
    x = torch.randn(3, 30, generator=generator)
    compiled = nvfp4.matmul(x, *weight, GLOBAL_SCALE, None, "int8")
    without = torch.ops.fp8_compile.nvfp4_mm_formula
    plain = without(x, *weight, torch.tensor(GLOBAL_SCALE), None, "int8", "interleaved")
    assert plain.dtype == x.dtype and error(plain, compiled.double()) < SUMMING


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


def test_wrong_dtypes_and_shapes_are_refused(generator: torch.Generator) -> None:
    codes, scales = random_weight(16, 32, generator)
    with pytest.raises(TypeError, match="float8_e4m3fn, got torch.uint8 and torch.float32"):
        nvfp4.interleave(codes, scales.float())
    with pytest.raises(ValueError, match="pad K"):
        nvfp4.interleave(codes[:, :12], scales)
    weight = nvfp4.interleave(codes, scales)
    with pytest.raises(RuntimeError, match="got torch.int64"):
        nvfp4.matmul(torch.zeros(2, 32, dtype=torch.int64), *weight, 1.0)
    with pytest.raises(RuntimeError, match=r"got x \(2, 16\) and codes \(16, 16\)"):
        nvfp4.matmul(torch.zeros(2, 16), *weight, 1.0)
    with pytest.raises(RuntimeError, match="activations='int4'"):
        nvfp4.matmul(torch.zeros(2, 32), *weight, 1.0, None, "int4")
    with pytest.raises(RuntimeError, match=r"bias: expected .* of shape \(16,\).* got .* of shape \(15,\)"):
        nvfp4.matmul(torch.zeros(2, 32), *weight, 1.0, torch.zeros(15))
