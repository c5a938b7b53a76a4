"""Quantize a matrix for the two gemms that read it: along its rows, and along its columns as a transposed copy.

    q,   dequant   = quantize(x, block)                q: [R, C],     dequant: [ceil(R/r), ceil(C/c)]
    q_t, dequant_t = quantize(transpose(x), block)     q_t: [C, R'],  dequant_t: [ceil(C/r), ceil(R/c)]

x: [R, C] fp32/bf16/fp16 -> q, q_t fp8 row-major, dequant scales fp32. ``block`` (r, c) as in ``quantize.py``: (1, -1),
(1, 128) or (128, 128). R' is the next multiple of ``multiple``; what is beyond R is zero. ``via``: x is rounded to that
dtype first, as autocast does before a matmul.

Scales are stored as cuBLAS reads them: those of rows in a line, those of 1x128 blocks with the row as the fastest
dimension, those of 128x128 blocks along the contraction, in lines of a multiple of 4.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .define_op import define
from .quantize import WHOLE, Block, quantize

Both = tuple[Tensor, Tensor, Tensor, Tensor]  # q, dequant, q_t, dequant_t
Q, DEQUANT, Q_T, DEQUANT_T = range(4)
LINE = 4  # scales of 128x128 blocks


def quantize_both(
    x: Tensor, dtype: torch.dtype, block: Block, multiple: int = 1, via: torch.dtype | None = None
) -> Both:
    """The formula above in plain PyTorch."""
    x = x if via is None else x.to(via)
    results = empty_results(x, dtype, block, multiple)
    results[Q_T].view(torch.uint8).zero_()
    for (q, dequant), matrix in ((results[:2], x), (results[2:], x.t())):
        codes, scales = quantize(matrix, dtype, block)
        q[:, : codes.shape[1]].copy_(codes)
        dequant.copy_(scales)
    return results


def empty_results(x: Tensor, dtype: torch.dtype, block: Block, multiple: int = 1) -> Both:
    """The four results, not yet computed."""
    rows, cols = x.shape
    padded = rows + -rows % multiple
    scales = [
        [1 if b == WHOLE else (n + b - 1) // b for n, b in zip(shape, block)] for shape in ((rows, cols), (cols, rows))
    ]
    q, q_t = x.new_empty((rows, cols), dtype=dtype), x.new_empty((cols, padded), dtype=dtype)
    return q, _empty_scales(x, scales[0], block), q_t, _empty_scales(x, scales[1], block)


def _empty_scales(x: Tensor, sizes: list[int], block: Block) -> Tensor:
    """The scales of a gemm's operand, [rows, contraction] of it."""
    if block[0] != 1:
        lines, tiles = sizes
        return x.new_empty((lines, tiles + -tiles % LINE), dtype=torch.float32).narrow(1, 0, tiles)
    if statically_known_true(sizes[1] == 1):
        return x.new_empty(sizes, dtype=torch.float32)
    return x.new_empty(sizes[::-1], dtype=torch.float32).t()


def _fake(x: Tensor, dtype: torch.dtype, block: list[int], multiple: int, via: torch.dtype | None) -> Both:
    return empty_results(x, dtype, block, multiple)


# Stands for one read of x and both its results in a graph, until it is known which of them are used there.
quantize_both_op = define(
    "quantize_both(Tensor x, ScalarType dtype, int[2] block, int multiple, ScalarType? via)"
    " -> (Tensor q, Tensor dequant, Tensor q_t, Tensor dequant_t)",
    quantize_both,
    _fake,
)
