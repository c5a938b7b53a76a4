"""The lowering of ``kernels/relayout.py``.

It differs from those of ``permute`` and ``constant_pad_nd`` in two ways:

- bytes are moved as integers: Triton may miscompile a transposed store of FP8 values (rare NaNs, triton#11111);
- the result is a buffer with the dtype changed by a reinterpreting view. Inductor 2.13 takes a bitcast of a value
  that is not yet in memory for something it must copy before a gemm, and copies it row-major.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.ir import ExternKernel
from torch._inductor.lowering import clone, constant_pad_nd, permute, register_lowering, to_dtype_bitcast
from torch._inductor.virtualized import V

from fp8_compile.kernels.relayout import relayout_op


@register_lowering(relayout_op, type_promotion_kind=None)
def _lowering(q: Any, transposed: bool, row_multiple: int, col_multiple: int, separate: bool = False) -> Any:
    if separate:
        q = ExternKernel.realize_input(q)
    moved = to_dtype_bitcast(q, torch.uint8)
    if transposed:
        moved = permute(moved, [1, 0] if len(moved.get_size()) == 2 else [0, 2, 1])
    if row_multiple > 1 or col_multiple > 1:
        rows, cols = moved.get_size()[-2:]
        moved = constant_pad_nd(moved, [0, -cols % col_multiple, 0, -rows % row_multiple], 0)
    copy: Any = ExternKernel.require_contiguous(clone(moved))
    if separate:
        V.graph.no_fuse_buffer_names.add(copy.get_name())
    return to_dtype_bitcast(copy, q.get_dtype())
