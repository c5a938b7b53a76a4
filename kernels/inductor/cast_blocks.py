"""The second half of a quantize, as one operation of a graph for a GPU.

    q = fp8(clamp(x * quant_scale, -F, F))      x: [R, C], quant_scale: [ceil(R/r), ceil(C/c)] fp32 -> q: [R, C] fp8

F is the largest value of the format, (r, c) the ``block``; see ``quantize.py``.

Inductor writes the kernel, fused with whatever computes x. It stops inlining where an expression has more than a
hundred operations, and stores what it has by then. In a chain of plain ops that may be the scaled value, four bytes an
element; after a single op it is q.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv

from fp8_compile.kernels.formats import format_of
from fp8_compile.kernels.quantize import WHOLE, cast

_library = torch.library.Library("fp8_compile", "FRAGMENT")
_library.define("cast_blocks(Tensor x, Tensor quant_scale, ScalarType dtype, int[2] block) -> Tensor")
_library.impl("cast_blocks", cast, "CompositeExplicitAutograd")
torch.library.register_fake(
    "fp8_compile::cast_blocks", lambda x, quant_scale, dtype, block: x.new_empty(x.shape, dtype=dtype), lib=_library
)
cast_blocks_op = torch.ops.fp8_compile.cast_blocks.default


@register_lowering(cast_blocks_op, type_promotion_kind=None)
def _lowering(x, quant_scale, dtype, block):  # type: ignore[no-untyped-def]
    load, load_scale = x.make_loader(), quant_scale.make_loader()
    largest = format_of(dtype).max

    def code(index: Any) -> Any:
        of_block = [0 if size == WHOLE else FloorDiv(at, size) for at, size in zip(index, block)]
        scaled = ops.mul(ops.to_dtype(load(index), torch.float32), load_scale(of_block))
        least, most = (ops.constant(bound, torch.float32) for bound in (-largest, largest))
        return ops.to_dtype(ops.minimum(ops.maximum(scaled, least), most), dtype, src_dtype=torch.float32)

    return ir.Pointwise.create(device=x.get_device(), dtype=dtype, inner_fn=code, ranges=list(x.get_size()))
