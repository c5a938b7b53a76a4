"""The second half of a quantize, as one operation of a graph for a GPU.

    q = fp8(clamp(x * quant_scale, -F, F))      x: [R, C], quant_scale: [ceil(R/r), ceil(C/c)] fp32 -> q: [R, C] fp8

F is the largest value of the format, (r, c) the ``block``; the formula is :func:`quantize.cast`. Inductor writes the
kernel, fused with whatever computes x (``kernels/inductor/cast_blocks.py``).

Inductor stops inlining where an expression has more than a hundred operations, and stores what it has by then. In a
chain of plain ops that may be the scaled value, four bytes per element; after a single op it is q.
"""

from __future__ import annotations

from .define_op import define
from .quantize import cast

cast_blocks_op = define(
    "cast_blocks(Tensor x, Tensor quant_scale, ScalarType dtype, int[2] block) -> Tensor",
    cast,
    lambda x, quant_scale, dtype, block: x.new_empty(x.shape, dtype=dtype),
)
