"""The MXFP8 gemms of experts as a GPU has them; a part of ``PairMx``.

    Before:  y = mx_grouped_mm(q, permute(view(qw)), ends, s, permute(sw), bf16)
             dw = mx_grouped_mm(permute(qg), q', ends, permute(sg), s', bf16)
    After:   y = swizzled_mx_grouped_mm(q, permute(view(qw)), ends, s, sw)
             dw = swizzled_mx_grouped_mm(permute(qg), q', ends, scales_by_group(sg), scales_by_group(s'))

The gemm reads operands with K contiguous, and each matrix of a stack by itself. So what the gradient of the weights
reads is stored transposed, and a stack of weights once for each direction; the scales of a contraction over tokens
change places, in pieces, for which they are read and written once more. They are a 32nd of the codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from fp8_compile.kernels.mx_grouped_mm import scales_by_group, swizzled_mx_grouped_mm_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit, inline, policy_of, value
from ..graph.marks import Kind, Mark
from ..graph.views import untransposed

if TYPE_CHECKING:
    from .pair_mx import Quantizes

aten, prims = torch.ops.aten, torch.ops.prims


def replace_grouped(graph: fx.Graph, gemm: fx.Node, quantizes: Quantizes) -> None:
    """Put the GPU's gemm in the place of one ``mx_grouped_mm``."""
    left, right, ends, _, _, dtype = arguments(gemm)
    with graph.inserting_before(gemm):
        q_left, scale_left = quantizes.operand(quantizes.side(left, is_left=True), gemm, k_contiguous=True)
        if value(right).dim() == 3:
            q_right, scale_right = _experts(graph, gemm, right, quantizes)
        else:
            q_right, scale_right = quantizes.operand(quantizes.side(right, is_left=False), gemm, k_contiguous=True)
            sizes = value(q_left).shape[0], value(q_right).shape[1]
            scale_left, scale_right = (
                inline(graph, scales_by_group, scale, ends, size, like=gemm)
                for scale, size in zip((scale_left, scale_right), sizes)
            )
        operands = (q_left, q_right, ends, scale_left, scale_right)
        mark = Mark(kind=Kind.GEMM)
        result = emit(graph, swizzled_mx_grouped_mm_op, *operands, like=gemm, tags=policy_of(gemm), mark=mark)
        if dtype != torch.bfloat16:
            result = emit(graph, prims.convert_element_type.default, result, dtype, like=gemm)
    gemm.replace_all_uses_with(result)
    graph.erase_node(gemm)


def _experts(graph: fx.Graph, gemm: fx.Node, right: fx.Node, quantizes: Quantizes) -> tuple[fx.Node, fx.Node]:
    """Codes [E, K, N] with K contiguous, and the scales of each expert."""
    stack, flipped = untransposed(right)  # a view of the codes of [E * rows, columns]
    experts, rows, cols = value(stack).shape
    quantize = input_of(input_of(stack))
    if flipped:  # K is contiguous as it is stored
        q, scale, _ = quantizes.results(quantize, gemm)
        shape = [experts, rows, cols]
    else:
        q, scale, _ = quantizes.stack_across(quantize, int(experts), gemm)
        shape = [experts, cols, rows]
    q = emit(graph, aten.view.default, q, shape, like=gemm)
    return emit(graph, aten.permute.default, q, [0, 2, 1], like=gemm), scale
