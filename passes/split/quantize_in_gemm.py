"""Quantize and multiply in one call of our C++ on a CPU."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from fp8_compile.kernels.cpu.quantize import quantize_delayed_op
from fp8_compile.kernels.cpu.quantize_mm import quantize_delayed_mm_op, quantize_mm_op
from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op
from fp8_compile.kernels.formats import E4M3, E5M2
from fp8_compile.kernels.fp8_inputs import ROWS, quantize_inputs_op
from fp8_compile.kernels.quantize import HIGH_PRECISION, WHOLE, quantize_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit, getitem, value
from ..graph.marks import Kind, Mark
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten
TENSOR = (WHOLE, WHOLE)
AMAX = 3  # which result of quantize_delayed it is
# Which results of a quantize are its codes and its dequant_scale.
RESULTS = {quantize_op: (0, 1), quantize_inputs_op: (0, 1), quantize_delayed_op: (0, 2)}


class QuantizeInGemm(GraphPass):
    """Let a gemm quantize what nothing else reads.

    Before:  q, s = fp8_compile.quantize(x);  qw, sw = fp8_compile.quantize(w)           or quantize_inputs(x)
             y = fp8_compile.scaled_mm(q, permute(qw), s, sw, bias, bf16)
    After:   y = fp8_compile.quantize_mm(x, None, w, None, bias, e5m2=False, rows=False)

    Before:  q, used, s, amax = fp8_compile.quantize_delayed(x, scale)
             y = fp8_compile.scaled_mm(q, permute(qw), s, sw, bias, bf16)
    After:   y, amax = fp8_compile.quantize_delayed_mm(x, scale, w, None, bias, e5m2=False)

    Skips: a result in another dtype than x; a tensor whose codes or scale are read by another gemm or by backward. Of a
    weight like that, or one that is FP8 already, the gemm takes the codes.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=scaled_mm_op)
        changes = sum(_fuse(graph, gemm) for gemm in gemms)
        return PassReport(changes, "gemms that quantize their operands")


class _Quantized(NamedTuple):
    """A tensor that is quantized for one gemm alone."""

    call: fx.Node
    x: fx.Node
    scale: Any  # a known one
    dtype: torch.dtype
    block: tuple[int, int]


def _fuse(graph: fx.Graph, gemm: fx.Node) -> bool:
    left, right, scale_left, scale_right, bias, out_dtype = arguments(gemm)
    found = _quantized(left, scale_left, gemm, gemm)
    if found is None or value(found.x).dtype != out_dtype:
        return False
    if not _is_transposed(right) or value(scale_right).shape[0] != 1:
        return False
    amaxes = [node for node in found.call.users if node.args[1] == AMAX]
    if any(reader < gemm for node in amaxes for reader in node.users):
        return False
    codes, scale = input_of(right), _without_views(scale_right)
    weight = _quantized(codes, scale, right, gemm if scale is scale_right else scale_right)
    own = weight is not None and weight.call.target is quantize_op and weight[3:] == found[3:]
    multiplied = (weight.x, None) if weight and own else (codes, scale_right)
    given = (found.x, found.scale, *multiplied, bias, found.dtype == E5M2.dtype)
    with graph.inserting_before(gemm):
        if found.call.target is quantize_delayed_op:
            both = emit(graph, quantize_delayed_mm_op, *given, like=gemm, mark=Mark(kind=Kind.GEMM))
            result, amax = getitem(graph, both, 0), getitem(graph, both, 1)
            for node in amaxes:
                node.replace_all_uses_with(amax)
        else:
            rows = found.block == ROWS
            result = emit(graph, quantize_mm_op, *given, rows, like=gemm, mark=Mark(kind=Kind.GEMM))
    gemm.replace_all_uses_with(result)
    graph.erase_node(gemm)
    return True


def _quantized(codes: Any, scale: Any, reader: fx.Node, scale_reader: fx.Node) -> _Quantized | None:
    """What codes and scale are made from, if they are made by one call and have no other reader. An amax may have."""
    call = _source(codes)
    if call is None or call is not _source(scale):
        return None
    read = {result.args[1] for result in call.users if result.users}
    if (codes.args[1], scale.args[1]) != RESULTS[call.target] or read - {AMAX} != {codes.args[1], scale.args[1]}:
        return None
    if set(codes.users) != {reader} or set(scale.users) != {scale_reader}:
        return None
    known, dtype, block = None, E4M3.dtype, TENSOR
    if call.target is quantize_op:
        x, dtype, block = arguments(call)
    elif call.target is quantize_inputs_op:
        (x, known), block = arguments(call), ROWS
    else:
        x, known, dtype, _ = arguments(call)
    extents = block[0], block[1]
    fits = value(x).dim() == 2 and value(x).dtype in HIGH_PRECISION and extents in (TENSOR, ROWS)
    return _Quantized(call, x, known, dtype, extents) if fits else None


def _source(node: Any) -> fx.Node | None:
    """The quantize that a node is a result of."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return None
    call = input_of(node)
    return call if call.target in RESULTS else None


def _is_transposed(node: Any) -> bool:
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0] and len(node.users) == 1


def _without_views(scale: fx.Node) -> fx.Node:
    """The scales [N, 1] of rows of a weight, of which a gemm reads [1, N]."""
    return input_of(scale) if scale.target is aten.permute.default and len(scale.users) == 1 else scale
