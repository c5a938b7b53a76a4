"""Products with stacks of packed matrices: the C++ against plain PyTorch, and which experts are read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8_compile import quantize_nvfp4
from fp8_compile.kernels import experts, fp8_weight
from fp8_compile.kernels.nvfp4 import ops


def nvfp4_stack(count: int, n: int, k: int) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Codes, block scales and global scales as checkpoints have them, and as the CPU's kernels read them."""
    matrices = [quantize_nvfp4(torch.randn(n, k) * 2.0**expert, "rtn") for expert in range(count)]
    parts = ("codes", "block_scales", "global_scale")
    codes, block_scales, scales = (torch.stack([getattr(one, part) for one in matrices]) for part in parts)
    return (codes, block_scales, scales), (*ops.from_standard(codes, block_scales, ops.INTERLEAVED), scales)


def fp8_stack(count: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    codes, scales = zip(*(fp8_weight.quantize(torch.randn(n, k) * 2.0**expert) for expert in range(count)))
    return torch.stack(codes), torch.stack(scales)


def by_row(x: Tensor, weight: Tensor, which: Tensor) -> Tensor:
    return torch.einsum("mk,mnk->mn", x.double(), weight.double()[which])


@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
@pytest.mark.parametrize("count, n, k", [(3, 40, 48), (1, 16, 40), (4, 33, 64)])
def test_every_row_is_multiplied_by_its_own_expert(count: int, n: int, k: int, dtype: torch.dtype, most: float) -> None:
    standard, interleaved = nvfp4_stack(count, n, k)
    fp8 = fp8_stack(count, n, k)
    weights = {
        "nvfp4": experts.nvfp4_dequantize_op(*standard, k, torch.float32, "standard"),
        "fp8": experts.fp8_dequantize_op(*fp8, torch.float32),
    }
    again = experts.nvfp4_dequantize_op(*interleaved, k, torch.float32, "interleaved")
    assert torch.equal(weights["nvfp4"], again)
    for rows in (1, 7, 70):  # one token, few, and so many that an expert's go through the gemm
        x = torch.randn(rows, k).to(dtype)
        which = torch.randint(0, count, (rows,))
        ends = torch.bincount(which, minlength=count).cumsum(0).to(torch.int32)
        for kind, index, own in (("gathered", which, which), ("grouped", ends, which.sort().values)):
            results = {
                "nvfp4": experts.nvfp4_mm_op(x, *interleaved, index, kind, "interleaved"),
                "fp8": experts.fp8_mm_op(x, *fp8, index, kind),
            }
            for format, result in results.items():
                expected = by_row(x, weights[format], own)
                assert result.dtype == dtype and (result - expected).norm() <= most * expected.norm(), (format, kind)


def test_the_plain_product_agrees_and_experts_without_rows_and_rows_without_experts_are_fine() -> None:
    standard, interleaved = nvfp4_stack(5, 24, 32)
    x = torch.randn(12, 32)
    for kind, index in (("gathered", torch.tensor([4, 1] * 6)), ("grouped", torch.tensor([0, 3, 3, 9, 9]))):
        ours = experts.nvfp4_mm_op(x, *interleaved, index, kind, "interleaved")
        plain = experts.nvfp4_mm_op(x, *standard, index, kind, "standard")
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert ours[9:].eq(0).all() and ours[:9].ne(0).all(), "no expert has the last rows"
    nothing = experts.nvfp4_mm_op(x[:0], *interleaved, torch.zeros(5, dtype=torch.int64), "grouped", "interleaved")
    assert nothing.shape == (0, 24)
    scattered = torch.randn(32, 12).t()  # rows that are not contiguous
    backwards = torch.arange(-5, 0).repeat(3)[:12]  # counted from the end, as an index does
    expected = experts.nvfp4_mm_op(scattered.contiguous(), *interleaved, backwards % 5, "gathered", "interleaved")
    assert torch.equal(experts.nvfp4_mm_op(scattered, *interleaved, backwards, "gathered", "interleaved"), expected)


def test_inf_and_nan_stay_in_their_row_and_spoil_it() -> None:
    _, stack = nvfp4_stack(2, 16, 32)
    fp8 = fp8_stack(2, 16, 32)
    x = torch.randn(6, 32)
    x[2, 3], x[4, 5] = torch.inf, torch.nan
    which = torch.tensor([0, 1, 0, 1, 0, 1])
    for result in (
        experts.nvfp4_mm_op(x, *stack, which, "gathered", "interleaved"),
        experts.fp8_mm_op(x, *fp8, which, "gathered"),
    ):
        spoilt = ~result.isfinite()
        assert spoilt[4].all() and spoilt[2].any() and not spoilt[[0, 1, 3, 5]].any()


def test_experts_that_are_not_there_are_an_error_and_not_read() -> None:
    _, stack = nvfp4_stack(3, 16, 32)
    x = torch.randn(2, 32)
    for kind, index in (("gathered", [0, 3]), ("grouped", [1, 0, 2]), ("grouped", [1, 2, 3])):
        with pytest.raises(RuntimeError, match="expected"):
            experts.nvfp4_mm_op(x, *stack, torch.tensor(index), kind, "interleaved")
    with pytest.raises(RuntimeError, match="experts from 0 to 1, got"):
        experts.fp8_mm_op(x, *fp8_stack(2, 16, 32), torch.tensor([0, 2]), "gathered")


def test_an_expert_that_no_row_goes_to_is_not_touched() -> None:
    """Its bytes may be anything: a scale of NaN would show."""
    _, (codes, block_scales, scales) = nvfp4_stack(3, 16, 32)
    x, which = torch.randn(4, 32), torch.tensor([0, 2, 2, 0])
    expected = experts.nvfp4_mm_op(x, codes, block_scales, scales, which, "gathered", "interleaved")
    block_scales.view(torch.uint8)[1], scales[1] = 0x7F, torch.nan
    assert torch.equal(experts.nvfp4_mm_op(x, codes, block_scales, scales, which, "gathered", "interleaved"), expected)
    some = experts.nvfp4_dequantize_op(codes, block_scales, scales, 32, torch.float32, "interleaved", which.view(2, 2))
    assert some.shape == (2, 2, 16, 32) and some.isfinite().all() and torch.equal(some[0, 1], some[1, 0])
