"""Products with NVFP4 weights on the CPU, straight from their packed form.

    w = e2m1 * e4m3_block_scale * global_scale,    blocks of 16 along K

codes: uint8 [N, K/2], even k in the low nibble, bit 3 the sign; block_scales: e4m3 [N, K/16]; K a multiple of 16.

The kernels read *interleaved* weights, whose shapes, dtypes and bytes are the same: rows go in groups of 16 (the last
group has the N % 16 that are left), and a group holds, 8 elements of K after 8 elements, 4 bytes of codes of each of
its rows; its block scales, block after block, a byte of each row. So a vector register loads the same 8 k of 16 rows,
a lane is a row, and nothing is ever added across lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16  # elements of K that share a block scale
GROUP = 16  # rows that are interleaved
_WORD = 4  # bytes of codes that a lane takes at once


def interleave(codes: Tensor, block_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Plain codes and block scales in the order the kernels read; contiguous copies of the same shapes and dtypes."""
    _check_weight(codes, block_scales)
    return _interleaved(codes, _WORD), _interleaved(block_scales, 1)


def deinterleave(codes: Tensor, block_scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of ``interleave``."""
    _check_weight(codes, block_scales)
    return _deinterleaved(codes, _WORD), _deinterleaved(block_scales, 1)


def _interleaved(x: Tensor, word: int) -> Tensor:
    """[rows, words] -> [words, rows] in each group of rows, words of so many bytes."""
    source = x.contiguous().view(torch.uint8)
    out = torch.empty_like(source)
    for rows, groups, size in _groups(source):
        words = source[rows].view(groups, size, -1, word).transpose(1, 2)
        out[rows].view(groups, -1, size, word).copy_(words)
    return out.view(x.dtype)


def _deinterleaved(x: Tensor, word: int) -> Tensor:
    source = x.contiguous().view(torch.uint8)
    out = torch.empty_like(source)
    for rows, groups, size in _groups(source):
        words = source[rows].view(groups, -1, size, word).transpose(1, 2)
        out[rows].view(groups, size, -1, word).copy_(words)
    return out.view(x.dtype)


def _groups(x: Tensor) -> list[tuple[slice, int, int]]:
    """(rows, number of groups in them, rows of a group): whole groups, then what is left."""
    whole, left = divmod(x.shape[0], GROUP)
    parts = [(slice(0, whole * GROUP), whole, GROUP), (slice(whole * GROUP, None), 1, left)]
    return [(rows, groups, size) for rows, groups, size in parts if groups and size and x.shape[1]]


def _check_weight(codes: Tensor, block_scales: Tensor) -> None:
    if codes.dtype != torch.uint8 or block_scales.dtype != torch.float8_e4m3fn:
        raise TypeError(
            "an NVFP4 weight has codes in uint8 and block_scales in float8_e4m3fn, "
            f"got {codes.dtype} and {block_scales.dtype}"
        )
    if codes.dim() != 2 or block_scales.shape != (codes.shape[0], codes.shape[1] * 2 // BLOCK) or codes.shape[1] % 8:
        raise ValueError(
            f"an NVFP4 weight has codes [N, K/2] and block_scales [N, K/{BLOCK}], K a multiple of {BLOCK}, "
            f"got {tuple(codes.shape)} and {tuple(block_scales.shape)}; pad K with zeros"
        )
