"""Keys and values in FP8 in C++ (``fp8_cache.cpp``, ``fp8_attention.cpp``): ``kernels/fp8_cache.py`` on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels import fp8_cache
from fp8_compile.kernels.operands import ANY, FLOATS, FP32, check, check_at_least, check_value

MASKS = (torch.bool, *FLOATS)


def quantize(x: Tensor, scales: Tensor | None) -> Tensor:
    """x [B, G, S, D] fp32, bf16 or fp16, scales fp32 [G] or None -> uint8 [B, G, S, D], or [B, G, S, D + 4]."""
    check("fp8_cache_quantize", "x", x, FLOATS, (ANY, ANY, ANY, ANY))
    if scales is not None:
        check("fp8_cache_quantize", "scales", scales, FP32, (x.shape[1],))
    return fp8_cache.quantize(x, scales)


def dequantize(rows: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The inverse, in a dtype."""
    check("fp8_cache_dequantize", "rows", rows, (torch.uint8,), (ANY, ANY, ANY, ANY))
    behind = fp8_cache.SCALE_BYTES if scales is None else 0
    check_at_least("fp8_cache_dequantize", "rows.shape[3]", rows.shape[3] - behind, 0)
    if scales is not None:
        check("fp8_cache_dequantize", "scales", scales, FP32, (rows.shape[1],))
    check_value("fp8_cache_dequantize", "dtype", dtype, FLOATS)
    return fp8_cache.dequantize(rows, scales, dtype)


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
    """query [B, H, Q, D] fp32, bf16 or fp16, keys and values uint8 [B, G, S, D + 4], or [B, G, S, D] with scales fp32
    [G], mask bool or a float that goes with [B, H, Q, S] -> [B, H, Q, D] in query's dtype."""
    check("fp8_attention", "query", query, FLOATS, (ANY, ANY, ANY, ANY))
    batch, heads, queries, width = query.shape
    behind = fp8_cache.SCALE_BYTES if key_scales is None else 0
    check("fp8_attention", "keys", keys, (torch.uint8,), (batch, ANY, ANY, width + behind))
    groups, length = keys.shape[1:3]
    check("fp8_attention", "values", values, (torch.uint8,), (batch, groups, length, ANY))
    if groups == 0 or heads % groups:
        raise RuntimeError(
            f"fp8_compile::fp8_attention: keys: expected as many groups as divide the {heads} heads of query, "
            f"got {groups}"
        )
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if scales is not None:
            check("fp8_attention", name, scales, FP32, (groups,))
    if mask is not None:
        whole = batch, heads, queries, length
        own = tuple(1 if n == 1 else m for n, m in zip(mask.shape, whole)) if mask.dim() == 4 else whole
        check("fp8_attention", "mask", mask, MASKS, own)
    return fp8_cache.attention(query, keys, values, key_scales, value_scales, mask, scale, is_causal)
