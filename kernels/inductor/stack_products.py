"""The lowering of ``kernels/stack_products.py``: a pointwise loop over all products."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import ops

from fp8_compile.kernels.stack_products import stack_products_op


@register_lowering(stack_products_op, type_promotion_kind=None)
def _lowering(left: Any, right: Any) -> Any:
    loads = [(a.make_loader(), len(a.get_size()), b.make_loader(), len(b.get_size())) for a, b in zip(left, right)]

    def product(index: Any) -> Any:
        at = ops.index_expr(index[0], torch.int32)
        found = None
        for place, (load_a, dims_a, load_b, dims_b) in enumerate(loads):
            one = ops.mul(load_a([0] * dims_a), load_b([0] * dims_b))
            here = ops.eq(at, ops.constant(place, torch.int32))
            found = one if found is None else ops.where(here, one, found)
        return found

    device = left[0].get_device()
    result = ir.Pointwise.create(device=device, dtype=torch.float32, inner_fn=product, ranges=[len(loads)])
    result.realize()  # gemms read it by its address
    return result
