"""Let the kernels that quantize gradients sum their columns, which are the gradients of biases."""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8_compile.kernels.cast_blocks import cast_blocks_op
from fp8_compile.kernels.mx_swizzled import quantize_mx_swizzled_op
from fp8_compile.kernels.nvfp4_swizzled import quantize_nvfp4_swizzled_op
from fp8_compile.kernels.quantize import WHOLE
from fp8_compile.kernels.record_amax import record_amax_op
from fp8_compile.kernels.sum_tiles import TILE_ROWS, sum_tiles_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit, value
from ..graph.producers import made_by_reduction
from ..graph.views import root_of
from ..graph_pass import GraphPass, PassReport

aten, prims = torch.ops.aten, torch.ops.prims


class SumInQuantizes(GraphPass):
    """Replace the sum over the rows of a gradient that is quantized by one scale, in MXFP8 or in NVFP4, once
    the graph is split.

    Before:  db: bf16[N] = sum(dy, [0])                                   dy: bf16[M, N]
    After:   tiles: fp32[M / 64, N] = fp8_compile.sum_tiles(dy)           fused into the kernel that quantizes dy
             db = convert_element_type(sum(tiles, [0]), bf16)

    Skips: a dy that comes out of a norm's backward, whose kernel goes along rows, where Inductor adds up columns; and
    the other recipes with many scales per tensor, whose kernels look at whole rows, columns or blocks first.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        delayed = [input_of(node, 1) for node in graph.find_nodes(op="call_function", target=record_amax_op)]
        casts = graph.find_nodes(op="call_function", target=cast_blocks_op)
        by_one_scale = [input_of(node) for node in casts if tuple(arguments(node)[3]) == (WHOLE, WHOLE)]
        stores = (quantize_mx_swizzled_op, quantize_nvfp4_swizzled_op)
        blocks = [node for op in stores for node in graph.find_nodes(op="call_function", target=op)]
        quantized = {root_of(node) for node in (*delayed, *by_one_scale, *map(input_of, blocks))}
        changed = 0
        for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            x = input_of(node)
            if not _is_over_rows(node) or root_of(x) not in quantized or made_by_reduction(x):
                continue
            with graph.inserting_before(node):
                total = self._sum(graph, node)
            node.replace_all_uses_with(total)
            graph.erase_node(node)
            changed += 1
        return PassReport(changed, "sums over rows made where gradients are quantized")

    def _sum(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        x = input_of(node)
        dims, columns = value(x).dim(), value(x).shape[-1]
        matrix = x if dims == 2 else emit(graph, aten.reshape.default, x, [-1, columns], like=node)
        tiles = emit(graph, sum_tiles_op, matrix, like=node)
        total = emit(graph, aten.sum.dim_IntList, tiles, [0], like=node)
        total = emit(graph, prims.convert_element_type.default, total, value(node).dtype, like=node)
        kept = value(node).dim() == dims
        return emit(graph, aten.reshape.default, total, [*(dims - 1) * [1], -1], like=node) if kept else total


def _is_over_rows(node: fx.Node) -> bool:
    """True for a sum over all dimensions of a tensor but the last one, and over more than one tile."""
    summed, over, *_ = arguments(node)
    x = value(summed)
    dims = sorted(dim % x.dim() for dim in over or range(x.dim()))
    rows = math.prod(x.shape[:-1])
    over_rows = dims == list(range(x.dim() - 1)) and isinstance(x.shape[-1], int)
    return over_rows and not statically_known_true(rows <= TILE_ROWS)
