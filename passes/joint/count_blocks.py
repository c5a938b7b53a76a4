"""Count what becomes of tensors that are quantized in blocks, for ``stats=True``.

Before:  q, s = fp8_compile.quantize_mx(x, [1, 32])
After:   q, s = fp8_compile.quantize_mx(x, [1, 32])
         counted = count_mx(x, dequantize_mx_operand(q, s, [1, 32], float32), [1, 32])      kernels/block_counts.py

Of an input and a weight it is what forward multiplies, of a gradient what the gradient of the input is made from: what
is quantized along tokens for the gradient of a weight is not counted a second time. A gradient that has no other use,
as that of the first layer, is counted there by MXFP8; by NVFP4 it is rotated there, and not counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8_compile.kernels.block_counts import count_mx, count_nvfp4
from fp8_compile.kernels.dequantize_operand import dequantize_mx_operand_op, dequantize_nvfp4_operand_op
from fp8_compile.kernels.mxfp8 import quantize_mx_op
from fp8_compile.kernels.nvfp4_training import quantize_nvfp4_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit, getitem, inline, value
from ..graph.marks import mark_of
from ..graph.roles import Role

aten = torch.ops.aten


def counted_nodes(graph: fx.Graph) -> list[fx.Node]:
    """One quantize of each tensor and use."""
    found: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.target not in (quantize_mx_op, quantize_nvfp4_op) or (use := mark_of(node).use) is None:
            continue
        gemm, of_gradient = mark_of(node).gemm, use.role is Role.GRAD_OUTPUT
        if gemm == ("grad_input" if of_gradient else "output"):
            found[use] = node
        elif of_gradient and node.target is quantize_mx_op:
            found.setdefault(use, node)
    return list(found.values())


def count_block_quantize(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The counts of one quantize."""
    x = input_of(node)
    with graph.inserting_before(node.next):
        q, scale = getitem(graph, node, 0), getitem(graph, node, 1)
        if node.target is quantize_mx_op:
            _, block = arguments(node)
            back = emit(graph, dequantize_mx_operand_op, q, scale, list(block), torch.float32, like=node)
            counted: fx.Node = inline(graph, count_mx, x, back, list(block), like=node)
            return counted
        _, enc, block, transpose, *_ = arguments(node)
        if transpose:
            x = emit(graph, aten.permute.default, x, [1, 0], like=node)
        dequant = emit(graph, aten.reciprocal.default, enc, like=node)
        operands = (q, scale, dequant, list(block), value(x).shape[1], torch.float32)
        back = emit(graph, dequantize_nvfp4_operand_op, *operands, like=node)
        counted = inline(graph, count_nvfp4, x, back, enc, list(block), like=node)
        return counted
