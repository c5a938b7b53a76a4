"""Quantize and multiply in one call of our C++ on a CPU."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from fp8_compile.kernels.cpu.quantize_mm import quantize_mm_op
from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op
from fp8_compile.kernels.formats import E4M3
from fp8_compile.kernels.fp8_inputs import ROWS, quantize_inputs_op
from fp8_compile.kernels.quantize import HIGH_PRECISION, WHOLE, quantize_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit, value
from ..graph.marks import Kind, Mark
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten
TENSOR = (WHOLE, WHOLE)


class QuantizeInGemm(GraphPass):
    """Let a gemm quantize what nothing else reads.

    Before:  q, s = fp8_compile.quantize(x);  qw, sw = fp8_compile.quantize(w)           or quantize_inputs(x)
             y = fp8_compile.scaled_mm(q, permute(qw), s, sw, bias, bf16)
    After:   y = fp8_compile.quantize_mm(x, None, w, None, bias, float8_e4m3fn, False, bf16)

    Skips: a tensor whose codes or scale are read by another gemm or by backward; of a weight like that, or one that is
    FP8 already, the gemm takes the codes.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=scaled_mm_op)
        changes = sum(_fuse(graph, gemm) for gemm in gemms)
        return PassReport(changes, "gemms that quantize their operands")


class _Quantized(NamedTuple):
    """A tensor that is quantized for one gemm alone."""

    x: fx.Node
    scale: Any  # a known one
    dtype: torch.dtype
    block: tuple[int, int]


def _fuse(graph: fx.Graph, gemm: fx.Node) -> bool:
    left, right, scale_left, scale_right, bias, out_dtype = arguments(gemm)
    found = _quantized(left, scale_left, gemm)
    if found is None or not _is_transposed(right) or value(scale_right).shape[0] != 1:
        return False
    codes, scale = input_of(right), _without_views(scale_right)
    weight = _quantized(codes, scale, right, scale_right if scale is not scale_right else gemm)
    with graph.inserting_before(gemm):
        if weight is not None and weight[1:] == found[1:]:
            sides = found.x, None, weight.x, None
        else:
            sides = found.x, found.scale, codes, scale_right
        options = found.dtype, found.block == ROWS, out_dtype
        result = emit(graph, quantize_mm_op, *sides, bias, *options, like=gemm, mark=Mark(kind=Kind.GEMM))
    gemm.replace_all_uses_with(result)
    graph.erase_node(gemm)
    return True


def _quantized(codes: Any, scale: Any, reader: fx.Node, scale_reader: fx.Node | None = None) -> _Quantized | None:
    """What codes and scale are made from, if they are made by one call and have no other reader."""
    call = _source(codes, 0)
    if call is None or call is not _source(scale, 1):
        return None
    if set(codes.users) != {reader} or set(scale.users) != {scale_reader or reader} or len(call.users) != 2:
        return None
    if call.target is quantize_op:
        x, dtype, block = arguments(call)
        known, block = None, tuple(block)
    else:
        x, known = arguments(call)
        dtype, block = E4M3.dtype, ROWS
    fits = value(x).dtype in HIGH_PRECISION and block in (TENSOR, ROWS)
    return _Quantized(x, known, dtype, block) if fits else None


def _source(node: Any, index: int) -> fx.Node | None:
    """The quantize that a node is a result of."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[1] != index:
        return None
    call = input_of(node)
    return call if call.target in (quantize_op, quantize_inputs_op) else None


def _is_transposed(node: Any) -> bool:
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0] and len(node.users) == 1


def _without_views(scale: fx.Node) -> fx.Node:
    """The scales [N, 1] of rows of a weight, of which a gemm reads [1, N]."""
    return input_of(scale) if scale.target is aten.permute.default and len(scale.users) == 1 else scale
