"""Rows of an FP8 cache, and attention over them, against the formula in FP64 and for every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from instruction_sets import RUNNABLE, using
from torch import Tensor

from fp8_compile.kernels import fp8_cache as plain


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


def exact(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """torch's own attention in FP64, over keys and values [B, G, S, D]."""
    repeats = query.shape[1] // keys.shape[1]
    k, v = (one.double().repeat_interleave(repeats, 1) for one in (keys, values))
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return torch.nn.functional.scaled_dot_product_attention(query.double(), k, v, mask, is_causal=causal, scale=scale)


def given(sizes: tuple[int, ...], dtype: torch.dtype, static: bool) -> tuple[Any, ...]:
    batch, heads, groups, queries, length, width, value_width = sizes
    query = torch.randn(batch, heads, queries, width).to(dtype)
    made: list[Any] = [query]
    for own in (width, value_width):
        scales = torch.rand(groups) * 0.01 + 0.01 if static else None
        made += [plain.quantize_op(torch.randn(batch, groups, length, own).to(dtype), scales), scales]
    return tuple(made)


@pytest.mark.parametrize(
    "sizes, static, mask, dtype",
    [
        ((2, 8, 2, 1, 530, 64, 64), False, "bool", torch.bfloat16),
        ((1, 3, 3, 1, 70, 20, 52), True, None, torch.float32),
        ((2, 6, 2, 3, 130, 128, 96), False, "added", torch.float16),
        ((1, 10, 2, 5, 40, 8, 8), True, "causal", torch.bfloat16),
        ((1, 2, 1, 2, 16, 6, 3), False, "per head", torch.float32),
    ],
    ids=["gqa", "odd widths", "few queries", "causal", "unaligned"],
)
def test_attention_is_that_over_dequantized_keys_and_values(
    kernels: str, sizes: tuple[int, ...], static: bool, mask: str | None, dtype: torch.dtype
) -> None:
    query, keys, key_scales, values, value_scales = given(sizes, dtype, static)
    batch, heads, _, queries, length, *_ = sizes
    masks = {
        "bool": torch.rand(batch, 1, 1, length) > 0.3,
        "added": torch.randn(1, 1, queries, length).to(dtype),
        "per head": torch.randn(batch, heads, queries, length),
    }
    chosen = masks.get(mask or "")
    found = plain.attention_op(query, keys, values, key_scales, value_scales, chosen, 0.3, mask == "causal")
    k, v = (
        plain.dequantize(rows, scales, torch.float32) for rows, scales in ((keys, key_scales), (values, value_scales))
    )
    wanted = exact(query, k, v, chosen, 0.3, mask == "causal")
    # FP32 sums of a softmax: errors of scores count by their size, those of weights by the values'.
    rounding = torch.finfo(dtype).eps / 2 * wanted.abs() if dtype != torch.float32 else 0
    assert found.dtype == dtype and ((found.double() - wanted).abs() <= 1e-5 * v.abs().max() + rounding).all()


@pytest.mark.parametrize(
    "dtype, static", [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_rows_are_those_of_the_formula_and_inf_and_nan_do_not_vanish(
    kernels: str, dtype: torch.dtype, static: bool
) -> None:
    scales = torch.rand(3) * 0.01 + 0.001 if static else None
    x = torch.randn(2, 3, 77, 20).to(dtype)
    x[0, 0, 3] = 0
    x[0, 1, 2] *= 1e-4
    x[1, 2, 5, 7], x[1, 1, 5, 7] = math.inf, math.nan
    rows = plain.quantize_op(x, scales)
    assert torch.equal(rows, plain.quantize(x, scales))
    back = plain.dequantize_op(rows, scales, dtype)
    assert torch.equal(back.isnan(), plain.dequantize(rows, scales, dtype).isnan())
    assert torch.equal(back.nan_to_num(), plain.dequantize(rows, scales, dtype).nan_to_num())
    assert back[1, 2, 5, 7].isnan() and back[1, 1, 5, 7].isnan()
    if not static:  # 3 bits of a significand: half a step of 1/8 where a number is not far below the row's largest
        fine = x.isfinite().all(-1, keepdim=True) & (x.abs() > x.abs().amax(-1, keepdim=True) / 1000)
        assert ((back - x).abs()[fine] <= x.abs()[fine] / 15).all()


def test_a_key_that_no_query_sees_is_not_read_and_one_that_is_seen_does_not_vanish() -> None:
    query, keys, _, values, _ = given((1, 4, 2, 1, 600, 32, 32), torch.bfloat16, False)
    rows = plain.quantize_op(torch.full((1, 2, 1, 32), math.nan), None)
    keys[:, :, 300:301] = values[:, :, 300:301] = rows
    seen = torch.ones(1, 1, 1, 600, dtype=torch.bool)
    assert plain.attention_op(query, keys, values, None, None, seen, 0.1, False).isnan().all()
    seen[..., 300] = False
    found = plain.attention_op(query, keys, values, None, None, seen, 0.1, False)
    torch.testing.assert_close(found, plain.attention(query, keys, values, None, None, seen, 0.1, False))
    nothing = plain.attention_op(query, keys, values, None, None, torch.zeros_like(seen), 0.1, False)
    assert torch.equal(nothing, torch.zeros_like(nothing))


def test_attention_does_not_depend_on_threads_or_strides_and_without_a_compiler_it_is_the_formula() -> None:
    query, keys, _, values, _ = given((2, 4, 2, 2, 1100, 64, 64), torch.bfloat16, False)
    before, found = torch.get_num_threads(), []
    apart = query.transpose(1, 2).contiguous().transpose(1, 2), keys.repeat(1, 1, 2, 1)[:, :, :1100], values
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(plain.attention_op(*apart, None, None, None, 0.1, False))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    formula = torch.ops.fp8_compile.fp8_attention_formula(query, keys, values, None, None, None, 0.1, False)
    torch.testing.assert_close(found[0], formula, rtol=0.01, atol=1e-3)  # bf16, from sums in another order


@pytest.mark.parametrize("op", [plain.attention_op, torch.ops.fp8_compile.fp8_attention_formula])
def test_what_does_not_fit_is_refused_in_the_same_words(op: Any) -> None:
    query, keys, _, values, _ = given((1, 4, 2, 1, 16, 8, 8), torch.float32, False)
    rest = None, None, None, 1.0, False
    with pytest.raises(RuntimeError, match=r"fp8_attention: keys: expected torch.uint8 of shape \(1, any, any, 12\)"):
        op(query, keys[..., :8], values, *rest)
    with pytest.raises(RuntimeError, match="as many groups as divide the 3 heads of query, got 2"):
        op(query[:, :3], keys, values, *rest)
    with pytest.raises(RuntimeError, match=r"mask: expected .*\(1, 1, 1, 16\)"):
        op(query, keys, values, None, None, torch.ones(1, 1, 1, 15, dtype=torch.bool), 1.0, False)
