"""Copy FP8 bytes into the layout that a GPU's gemm reads: transposed, and filled with zeros to round sizes.

    y[i, j] = q[i, j]  or  q[j, i] if transposed;  0 outside      q: [R, C] -> y: [R', C'] row-major

R' and C' are the next multiples of ``row_multiple`` and ``col_multiple``. Of a stack, [E, R, C], each matrix by itself.

Inductor writes the kernel, fused with the cast that makes q unless the copy is to be ``separate``
(``kernels/inductor/relayout.py``).
"""

from __future__ import annotations

import torch

from .define_op import define


def relayout(
    q: torch.Tensor, transposed: bool, row_multiple: int, col_multiple: int, separate: bool = False
) -> torch.Tensor:
    """The formula above in plain PyTorch.

    Rows that stay rows are filled up as FP8, without a view of their bytes. Where a symbolic size turns out to need no
    filling, Inductor drops the padding: two views of a dtype would then meet, and ``remove_redundant_views`` would give
    q the marks of the copy, so that q itself was taken for a copy (torch 2.13).
    """
    moved = q.view(torch.uint8).transpose(-2, -1) if transposed else q
    if row_multiple > 1 or col_multiple > 1:
        rows, cols = moved.shape[-2:]
        moved = torch.nn.functional.pad(moved, (0, -cols % col_multiple, 0, -rows % row_multiple))
    copy = moved.clone(memory_format=torch.contiguous_format)
    return copy.view(q.dtype) if transposed else copy


def _fake(
    q: torch.Tensor, transposed: bool, row_multiple: int, col_multiple: int, separate: bool = False
) -> torch.Tensor:
    *stack, rows, cols = q.shape
    rows, cols = (cols, rows) if transposed else (rows, cols)
    return q.new_empty((*stack, rows + -rows % row_multiple, cols + -cols % col_multiple))


relayout_op = define(
    "relayout(Tensor q, bool transposed, int row_multiple, int col_multiple, bool separate=False) -> Tensor",
    relayout,
    _fake,
)
