"""Keys and values of attention in FP8, as a cache stores them, and attention that reads them.

    a row:      the E4M3 codes of one head's vector, and after them, as four bytes, their FP32 scale; where the scale of
                the head is known, the codes alone
    scale       = amax(row) / 448, 1 for a row of zeros;   q = e4m3(x / scale)
    attention:  p = softmax(q . (k * key_scale) * scale + mask),   y = p (v * value_scale)

    fp8_cache_quantize(x, scales)                                          -> rows, uint8 [B, G, S, D + 4] or [..., D]
    fp8_cache_dequantize(rows, scales, dtype)                              -> x [B, G, S, D]
    fp8_attention(q, keys, values, key_scales, value_scales, mask, ...)    -> y [B, H, Q, D]

A row is one piece of memory, so that a cache moves, repeats and drops rows without knowing what is in them. Inf and NaN
do not vanish: by a scale of its own such a row is NaN, by a known scale the element is. Heads that share keys and
values are neighbours: head h reads group h * G // H.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .define_op import define
from .formats import E4M3

SCALE_BYTES = 4
TINY = torch.finfo(torch.float32).tiny


def quantize(x: Tensor, scales: Tensor | None) -> Tensor:
    """x [B, G, S, D], and scales fp32 [G] where they are known -> rows."""
    wide = x.to(torch.float32)
    if scales is not None:
        y = wide / scales[:, None, None]
        codes = torch.where(y.isfinite(), y.clamp(-E4M3.max, E4M3.max), math.nan).to(E4M3.dtype)
        return codes.view(torch.uint8)
    amax = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, (amax / E4M3.max).clamp(min=TINY))
    y = wide / scale
    codes = torch.where(y.isnan(), y, y.clamp(-E4M3.max, E4M3.max)).to(E4M3.dtype)
    return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], -1)


def dequantize(rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is not None:
        return (rows.view(E4M3.dtype).to(torch.float32) * scales[:, None, None]).to(dtype)
    codes, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous()
    return (codes.view(E4M3.dtype).to(torch.float32) * scale.view(torch.float32)).to(dtype)


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
) -> Tensor:
    """query [B, H, Q, D], keys and values rows of [B, G, S], mask bool or added, broadcast to [B, H, Q, S] -> [B, H, Q,
    D]; zeros for a query that the mask leaves no key. ``is_causal``: query i sees the keys up to i."""
    batch, heads, queries, _ = query.shape
    groups, length = keys.shape[1:3]
    repeats = heads // groups
    wide = torch.float32
    k = dequantize(keys, key_scales, wide).repeat_interleave(repeats, 1)
    v = dequantize(values, value_scales, wide).repeat_interleave(repeats, 1)
    scores = (query.to(wide) @ k.transpose(-1, -2)) * scale
    added = torch.zeros((), device=query.device)
    if mask is not None:
        added = torch.where(mask, 0.0, -math.inf) if mask.dtype == torch.bool else mask.to(wide)
    if is_causal:
        seen = torch.ones(queries, length, dtype=torch.bool, device=query.device).tril()
        added = torch.where(seen, added, -math.inf)
    hidden = (added == -math.inf).expand(scores.shape)
    scores = torch.where(hidden, -math.inf, scores + added)
    weights = torch.where(hidden.all(-1, keepdim=True), 0.0, scores.softmax(-1))
    # What no query sees may be anything: a weight of zero does not make zero of NaN.
    v = torch.where(hidden.all(2).unsqueeze(-1), 0.0, v)
    return (weights @ v).to(query.dtype)


def _fake_quantize(x: Tensor, scales: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] + (SCALE_BYTES if scales is None else 0)), dtype=torch.uint8)


def _fake_dequantize(rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    return rows.new_empty((*rows.shape[:-1], rows.shape[-1] - (SCALE_BYTES if scales is None else 0)), dtype=dtype)


def _fake_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    mask: Tensor | None,
    scale: float,
    is_causal: bool,
) -> Tensor:
    return query.new_empty((*query.shape[:-1], values.shape[-1] - (SCALE_BYTES if value_scales is None else 0)))


# dequantize_op stands for the cache in a graph, until attention of a few queries reads the rows themselves
# (passes/joint/read_fp8_cache.py).
quantize_op = define(
    "fp8_cache_quantize(Tensor x, Tensor? scales) -> Tensor",
    quantize,
    _fake_quantize,
    cpu="fp8_compile.kernels.cpu.fp8_cache:quantize",
)
dequantize_op = define(
    "fp8_cache_dequantize(Tensor rows, Tensor? scales, ScalarType dtype) -> Tensor",
    dequantize,
    _fake_dequantize,
    cpu="fp8_compile.kernels.cpu.fp8_cache:dequantize",
)
attention_op = define(
    "fp8_attention(Tensor query, Tensor keys, Tensor values, Tensor? key_scales, Tensor? value_scales, Tensor? mask, "
    "float scale, bool is_causal) -> Tensor",
    attention,
    _fake_attention,
    cpu="fp8_compile.kernels.cpu.fp8_cache:attention",
)
