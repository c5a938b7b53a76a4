"""The lowering of ``kernels/cast_blocks.py``: a pointwise loop."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import ops
from torch.utils._sympy.functions import FloorDiv

from fp8_compile.kernels.cast_blocks import cast_blocks_op
from fp8_compile.kernels.formats import format_of
from fp8_compile.kernels.quantize import WHOLE, Block


@register_lowering(cast_blocks_op, type_promotion_kind=None)
def _lowering(x: Any, quant_scale: Any, dtype: torch.dtype, block: Block) -> Any:
    load, load_scale = x.make_loader(), quant_scale.make_loader()
    largest = format_of(dtype).max

    def code(index: Any) -> Any:
        of_block = [0 if size == WHOLE else FloorDiv(at, size) for at, size in zip(index, block)]
        scaled = ops.mul(ops.to_dtype(load(index), torch.float32), load_scale(of_block))
        least, most = (ops.constant(bound, torch.float32) for bound in (-largest, largest))
        return ops.to_dtype(ops.minimum(ops.maximum(scaled, least), most), dtype, src_dtype=torch.float32)

    return ir.Pointwise.create(device=x.get_device(), dtype=dtype, inner_fn=code, ranges=list(x.get_size()))
