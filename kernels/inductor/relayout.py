"""Copy FP8 bytes into the layout that a GPU's gemm reads: transposed, and filled with zeros to round sizes.

    y[i, j] = q[i, j]  or  q[j, i] if transposed;  0 outside      q: [R, C] -> y: [R', C'] row-major

R' and C' are the next multiples of ``row_multiple`` and ``col_multiple``. Of a stack, [E, R, C], each matrix by itself.

Inductor writes the kernel, fused with the cast that makes q unless the copy is to be ``separate``. The lowering here
differs from ``permute`` and ``constant_pad_nd`` in two ways:

- bytes are moved as integers: Triton may miscompile a transposed store of FP8 values (rare NaNs, triton#11111);
- the result is a buffer with the dtype changed by a reinterpreting view. Inductor 2.13 takes a bitcast of a value
  that is not yet in memory for something it must copy before a gemm, and copies it row-major.
"""

from __future__ import annotations

import torch
from torch._inductor.ir import ExternKernel
from torch._inductor.lowering import clone, constant_pad_nd, permute, register_lowering, to_dtype_bitcast
from torch._inductor.virtualized import V


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


_library = torch.library.Library("fp8_compile", "FRAGMENT")
_library.define(
    "relayout(Tensor q, bool transposed, int row_multiple, int col_multiple, bool separate=False) -> Tensor"
)
_library.impl("relayout", relayout, "CompositeExplicitAutograd")
torch.library.register_fake("fp8_compile::relayout", _fake, lib=_library)
relayout_op = torch.ops.fp8_compile.relayout.default


@register_lowering(relayout_op, type_promotion_kind=None)
def _lowering(q, transposed, row_multiple, col_multiple, separate=False):  # type: ignore[no-untyped-def]
    if separate:
        q = ExternKernel.realize_input(q)
    moved = to_dtype_bitcast(q, torch.uint8)
    if transposed:
        moved = permute(moved, [1, 0] if len(moved.get_size()) == 2 else [0, 2, 1])
    if row_multiple > 1 or col_multiple > 1:
        rows, cols = moved.get_size()[-2:]
        moved = constant_pad_nd(moved, [0, -cols % col_multiple, 0, -rows % row_multiple], 0)
    copy = ExternKernel.require_contiguous(clone(moved))
    if separate:
        V.graph.no_fuse_buffer_names.add(copy.get_name())
    return to_dtype_bitcast(copy, q.get_dtype())
