"""The FP8 gemm of ragged groups in plain PyTorch: the reference, and what a CPU runs without a C++ compiler.

    rows       y[t, n]    = sum_k left[t, k] * right[g, k, n] * scale_left[t] * scale_right[g, n]     t in group g
    contract   y[g, m, n] = sum_t left[m, t] * right[t, n] * scale_left[m] * scale_right[n]           over t in group g

Group g is ``offsets[g - 1] <= t < offsets[g]``; it may be empty. Rows: left [T, K] fp8, right [G, K, N] fp8, with
scale_left [1, 1] or [T, 1] and scale_right [1, 1] or [G, 1, N] -> y [T, N]. Contract: left [M, T] fp8, right [T, N]
fp8, with scale_left [1, 1] or [M, 1] and scale_right [1, 1] or [1, N] -> y [G, M, N]. Scales are fp32, y is fp32, bf16
or fp16.

Rows after the last group are zeros. (``aten._grouped_mm`` leaves them as the memory was; zeros keep the amax of what
is made from them sound.) An empty sum times a scale is a result too: NaN where the scale is.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .scaled_mm import scaled_mm


def scaled_grouped_mm(
    left: Tensor, right: Tensor, offsets: Tensor, scale_left: Tensor, scale_right: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """The formulas above; which one, the dimensions of ``right`` say."""
    out = new_result(left, right, offsets, out_dtype).zero_()
    for group, (start, end) in enumerate(bounds(offsets, tokens=left.shape[0 if right.dim() == 3 else 1])):
        some = slice(start, end)
        if right.dim() == 3:
            scales = (
                scale_left if scale_left.shape[0] == 1 else scale_left[some],
                scale_right if scale_right.dim() == 2 else scale_right[group],
            )
            out[some] = scaled_mm(left[some], right[group], *scales, None, out_dtype)
        else:
            out[group] = scaled_mm(left[:, some], right[some], scale_left, scale_right, None, out_dtype)
    return out


def new_result(left: Tensor, right: Tensor, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Memory for the result."""
    groups = () if right.dim() == 3 else (offsets.shape[0],)
    return left.new_empty((*groups, left.shape[0], right.shape[-1]), dtype=out_dtype)


def bounds(offsets: Tensor, *, tokens: int, op: str = "scaled_grouped_mm") -> Iterator[tuple[int, int]]:
    """Where each group begins and ends. Offsets that fall, or that are after the last token, are an error: whoever
    multiplies by them would read memory that is not there."""
    start = 0
    for end in (ends := offsets.tolist()):
        if not start <= end <= tokens:
            raise RuntimeError(
                f"fp8_compile::{op}: offsets of groups must not fall, and not exceed the number of tokens, "
                f"{tokens}; got {ends}. Expected where each group ends: torch.cumsum of the groups' sizes"
            )
        yield start, end
        start = end
