"""The MXFP8 gemm of ragged groups: its formula, and the form that a GPU reads, with groups filled up on the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torchao.prototype.moe_training.kernels.mxfp8.quant import torch_to_blocked_2d_K_groups

from fp8_compile.kernels.gpu import mx_grouped_mm as on_gpu
from fp8_compile.kernels.mx_grouped_mm import (
    MULTIPLE,
    mx_grouped_mm_op,
    scales_by_group,
    swizzled_mx_grouped_mm_op,
)
from fp8_compile.kernels.mx_swizzled import quantize_mx_swizzled, swizzle
from fp8_compile.kernels.mxfp8 import dequantize_mx, quantize_mx
from fp8_compile.kernels.padded_groups import layout, take_rows

EXPERTS, K, N, TOKENS = 4, 256, 128, 320
GROUPS = {
    "ragged": (7, 0, 150, 1),
    "all in one": (0, TOKENS, 0, 0),
    "with a rest": (3, 40, 5, 6),
    "no tokens": (0, 0, 0, 0),
    "full": (128, 128, 63, 1),
}


def operands(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K], w [E, N, K], dy [T, N]."""
    sizes = (TOKENS, K), (EXPERTS, N, K), (TOKENS, N)
    return tuple(torch.randn(size, generator=generator) for size in sizes)  # type: ignore[return-value]


def rounded(x: Tensor, block: tuple[int, int]) -> Tensor:
    return dequantize_mx(*quantize_mx(x, block), block).double()


def by_rows(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """As a CPU multiplies: groups as they are."""
    q, scale = quantize_mx(x, (1, 32))
    q_w, scale_w = quantize_mx(w.reshape(-1, K), (32, 32))
    stack = q_w.view(w.shape), scale_w.view(EXPERTS, N // 32, K // 32)
    right, scales = (one.transpose(1, 2) for one in stack)
    return mx_grouped_mm_op(q, right, offsets, scale, scales, torch.bfloat16)


def over_tokens(x: Tensor, dy: Tensor, offsets: Tensor) -> Tensor:
    ends, source, _ = layout(offsets, TOKENS, 32)
    (q_dy, scale_dy), (q_x, scale_x) = (quantize_mx(take_rows(side, source), (32, 1)) for side in (dy, x))
    return mx_grouped_mm_op(q_dy.t(), q_x, ends, scale_dy.t(), scale_x, torch.bfloat16)


def by_rows_as_a_gpu_has_it(x: Tensor, w: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    ends, source, _ = layout(offsets, TOKENS, MULTIPLE)
    q, scale, _ = quantize_mx_swizzled(take_rows(x, source), (1, 32))
    q_w, scale_w, _ = quantize_mx_swizzled(w.reshape(-1, K), (32, 32))
    return q, q_w.view(w.shape).transpose(1, 2), ends, scale, scale_w


def over_tokens_as_a_gpu_has_it(x: Tensor, dy: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    ends, source, _ = layout(offsets, TOKENS, MULTIPLE)
    (q_dy, _, scale_dy), (q_x, _, scale_x) = (
        quantize_mx_swizzled(take_rows(side, source), (32, 1), transposed=True) for side in (dy, x)
    )
    return q_dy.t(), q_x, ends, scales_by_group(scale_dy, ends, N), scales_by_group(scale_x, ends, K)


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
def test_groups_that_are_filled_up_give_what_groups_as_they_are_give_bit_for_bit(
    generator: torch.Generator, sizes: tuple[int, ...]
) -> None:
    x, w, dy = operands(generator)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    _, _, place = layout(offsets, TOKENS, MULTIPLE)
    y = by_rows(x, w, offsets)
    assert torch.equal(take_rows(swizzled_mx_grouped_mm_op(*by_rows_as_a_gpu_has_it(x, w, offsets)), place), y)
    dw = over_tokens(x, dy, offsets)
    assert torch.equal(swizzled_mx_grouped_mm_op(*over_tokens_as_a_gpu_has_it(x, dy, offsets)), dw)

    start = 0
    for expert, end in enumerate(offsets.tolist()):
        some = slice(start, end)
        expected = rounded(x[some], (1, 32)) @ rounded(w[expert], (32, 32)).t()
        torch.testing.assert_close(y[some].double(), expected, rtol=2**-8, atol=1e-4)
        expected = rounded(dy[some], (32, 1)).t() @ rounded(x[some], (32, 1))
        torch.testing.assert_close(dw[expert].double(), expected, rtol=2**-8, atol=1e-4)
        start = end
    assert not y[start:].any()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_the_results_of_its_expert_alone(generator: torch.Generator, poison: float) -> None:
    x, w, dy = operands(generator)
    offsets = torch.tensor([100, 200, 300, 320], dtype=torch.int32)
    x[150, 5] = poison
    _, _, place = layout(offsets, TOKENS, MULTIPLE)
    y = take_rows(swizzled_mx_grouped_mm_op(*by_rows_as_a_gpu_has_it(x, w, offsets)), place)
    assert not y[150].isfinite().any() and y.isfinite().all(1).sum() == TOKENS - 1
    dw = swizzled_mx_grouped_mm_op(*over_tokens_as_a_gpu_has_it(x, dy, offsets))
    assert not dw[1, :, 5].isfinite().any() and dw[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("sizes", [(128, 384, 128), (640, 128, 256)])
def test_scales_of_groups_are_where_torchao_puts_them(sizes: tuple[int, ...]) -> None:
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    scale = torch.randint(0, 255, (200, int(ends[-1]) // 32), dtype=torch.uint8)
    ours = scales_by_group(swizzle(scale), ends, 200)
    theirs, _ = torch_to_blocked_2d_K_groups(scale, ends // 32)
    assert torch.equal(ours, theirs.view(-1)[: len(ours)])


def test_what_a_gpu_is_given_passes_torchs_own_checks(generator: torch.Generator) -> None:
    x, w, dy = operands(generator)
    offsets = torch.tensor(GROUPS["ragged"]).cumsum(0).to(torch.int32)
    for given in (by_rows_as_a_gpu_has_it(x, w, offsets), over_tokens_as_a_gpu_has_it(x, dy, offsets)):
        expected = swizzled_mx_grouped_mm_op(*given)
        with FakeTensorMode():
            fake = [torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda") for one in given]
            y = on_gpu.multiply(*fake)
        assert (y.shape, y.dtype) == (expected.shape, expected.dtype)


def test_a_contraction_over_groups_that_share_a_block_is_refused() -> None:
    q, scale = torch.zeros(64, 64).to(torch.float8_e4m3fn), torch.zeros(64, 2, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"ends: expected multiples of 32.*got \[16, 64\]"):
        mx_grouped_mm_op(q, q, torch.tensor([16, 64], dtype=torch.int32), scale, scale.t(), torch.float32)


WRONG = {
    "left": torch.zeros(64, 96),
    "right": torch.zeros(3, 96, 32).to(torch.float8_e4m3fn),
    "ends": torch.tensor([16.0, 64.0]),
    "scale_left": torch.zeros(64, 4, dtype=torch.uint8),
    "scale_right": torch.zeros(1, 3, 32, dtype=torch.uint8),
    "out_dtype": torch.int8,
}


@pytest.mark.parametrize("argument", WRONG)
def test_an_operand_that_does_not_fit_is_refused_by_name(argument: str) -> None:
    given = {
        "left": torch.zeros(64, 96).to(torch.float8_e4m3fn),
        "right": torch.zeros(2, 96, 32).to(torch.float8_e4m3fn),
        "ends": torch.tensor([16, 64], dtype=torch.int32),
        "scale_left": torch.zeros(64, 3, dtype=torch.uint8),
        "scale_right": torch.zeros(2, 3, 32, dtype=torch.uint8),
        "out_dtype": torch.bfloat16,
    }
    assert mx_grouped_mm_op(*given.values()).shape == (64, 32)
    with pytest.raises(RuntimeError, match=f"fp8_compile::mx_grouped_mm: {argument}: expected .* got"):
        mx_grouped_mm_op(*{**given, argument: WRONG[argument]}.values())
