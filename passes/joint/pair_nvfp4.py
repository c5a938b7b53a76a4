"""Have NVFP4 operands quantized, and their scales ordered, the way gemms of a Blackwell GPU read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8_compile.kernels.dequantize_operand import dequantize_nvfp4_operand, dequantize_nvfp4_operand_op
from fp8_compile.kernels.gpu.cublaslt_nvfp4_mm import cublaslt_nvfp4_mm_op
from fp8_compile.kernels.mx_swizzled import unswizzle
from fp8_compile.kernels.nvfp4_swizzled import quantize_nvfp4_swizzled_op, quantize_nvfp4_tiles_op
from fp8_compile.kernels.nvfp4_training import SIZE, nvfp4_train_mm_op, quantize_nvfp4_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import NEVER_SAVED, emit, getitem, inline, policy_of, value
from ..graph.marks import Kind, Mark, mark_of
from ..graph_pass import GraphPass, PassReport
from .pair_mx import fill_vector, filled, policy_of_codes, same

aten = torch.ops.aten

Made = dict[Any, tuple[fx.Node, ...]]  # codes and scales by the quantize; of a weight in both layouts, by the weight


class PairNvfp4(GraphPass):
    """Replace quantizes and gemms in NVFP4 by those that a GPU has.

    Before:  c, s = quantize_nvfp4(x, enc, [1, 16], transpose, rotated, seed, 1, ...)
             y = nvfp4_train_mm(c, cw, s, sw, dequant, dequant', None, bf16)
    After:   c, s = quantize_nvfp4_swizzled(x, enc, 1.0, [1, 16], transpose, rotated, seed, 1, ..., K)
             y = cublaslt_nvfp4_mm(c, cw, s, sw, dequant * dequant', None, None, bf16)

    weights: cw, sw, cw_t, sw_t = quantize_nvfp4_tiles(w, enc, 1.0, ...)

    Each quantize is a store in the kernel that computes its tensor, and those of a tensor that are in the same half of
    the graph are in one kernel, with one read. Both operands of a gemm have K contiguous: forward writes a weight in
    both layouts, and saves the one that backward reads. Forward also saves what a weight's gradient reads of an input,
    unless backward computes the input anyway. What is not a multiple of 32 is filled up with zeros, on the way into
    that kernel.

    A number that the scale of a tensor is multiplied by becomes the kernel's own: a small tensor would be a kernel by
    itself.
    """

    leaves_no = (quantize_nvfp4_op, nvfp4_train_mm_op, dequantize_nvfp4_operand_op)

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=nvfp4_train_mm_op)
        made: Made = {}
        for gemm in gemms:
            _replace(graph, gemm, made)
        for node in graph.find_nodes(op="call_function", target=dequantize_nvfp4_operand_op):
            _dequantize(graph, node, made)
        return PassReport(len(gemms), "NVFP4 gemms whose operands are stored as the GPU reads them")


def _replace(graph: fx.Graph, gemm: fx.Node, made: Made) -> None:
    left, right, _, _, dequant_left, dequant_right, bias, dtype = arguments(gemm)
    (codes_left, scales_left), (codes_right, scales_right) = (
        _quantized(graph, input_of(side), gemm, made) for side in (left, right)
    )
    with graph.inserting_before(gemm):
        if bias is not None and not same(value(codes_right).shape[0], value(bias).shape[0]):
            bias = inline(graph, _fill_vector, bias, codes_right, like=gemm)
        alpha = emit(graph, aten.mul.Tensor, dequant_left, dequant_right, like=gemm, mark=Mark(kind=Kind.ALPHA))
        operands = (codes_left, codes_right, scales_left, scales_right, alpha, None, bias, dtype)
        mark = Mark(kind=Kind.GEMM)
        result = emit(graph, cublaslt_nvfp4_mm_op, *operands, like=gemm, tags=policy_of(gemm), mark=mark)
        if not all(map(same, value(result).shape, value(gemm).shape)):
            result = inline(graph, _cut, result, left, right, like=gemm)
    gemm.replace_all_uses_with(result)
    graph.erase_node(gemm)


def _dequantize(graph: fx.Graph, node: fx.Node, made: Made) -> None:
    """What codes stand for, for a backward gemm that is not NVFP4, from the scales as the forward gemm reads them."""
    codes, _, dequant, _, cols, dtype = arguments(node)
    quantize = input_of(codes)
    found = made.get(quantize) or made[_tensor(quantize)]
    results = found[2:] if arguments(quantize)[3] and len(found) == 4 else found[:2]
    operands = (*results, dequant, value(node).shape[0], cols, dtype)
    with graph.inserting_before(node):
        values = inline(graph, _dequantized, *operands, like=node, tags=NEVER_SAVED)
    node.replace_all_uses_with(values)
    graph.erase_node(node)


def _dequantized(
    codes: torch.Tensor, scales: torch.Tensor, dequant: torch.Tensor, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    outer, half = codes.shape
    by_row = unswizzle(scales.view(torch.uint8), outer, half // (SIZE // 2)).contiguous().view(scales.dtype)
    return dequantize_nvfp4_operand(codes, by_row, dequant, (1, SIZE), cols, dtype)[:rows]


def _quantized(graph: fx.Graph, node: fx.Node, gemm: fx.Node, made: Made) -> tuple[fx.Node, fx.Node]:
    """Codes and scales of what a quantize makes, once for all gemms that read it."""
    assert node.target is quantize_nvfp4_op, node.format_node()
    transpose, key = arguments(node)[3], _tensor(node)
    both = {arguments(user)[3] for user in key[0].users if user.target is quantize_nvfp4_op and _tensor(user) == key}
    if (known := made.get(node) or made.get(key)) is None:
        with graph.inserting_before(node):
            known = made[key if len(both) == 2 else node] = _make(graph, node, tiles=len(both) == 2)
    codes, scales = known[2:] if transpose and len(known) == 4 else known[:2]
    for result in (codes, scales):
        result.meta.update(policy_of_codes(node, gemm))
    return codes, scales


def _tensor(node: fx.Node) -> tuple[Any, ...]:
    """What is the same for both layouts of a weight, and different for all else."""
    x, enc, block, *_, four_over_six = arguments(node)
    return x, enc, four_over_six, None if block[0] == SIZE else node


def _make(graph: fx.Graph, node: fx.Node, *, tiles: bool) -> tuple[fx.Node, ...]:
    """The results of a quantize; ``tiles``: in both layouts."""
    x, enc, block, transpose, *others = arguments(node)
    numbered = value(x).shape[0 if transpose else 1]
    numbered = numbered + -numbered % SIZE
    enc, factor = _factored(enc)
    given, mark = (filled(graph, x, like=node), enc, factor), Mark(use=mark_of(node).use)
    if tiles:
        results = emit(graph, quantize_nvfp4_tiles_op, *given, others[-1], like=node, mark=mark)
    else:
        options = (block, transpose, *others, numbered)
        results = emit(graph, quantize_nvfp4_swizzled_op, *given, *options, like=node, mark=mark)
    return tuple(getitem(graph, results, index) for index in range(4 if tiles else 2))


def _factored(enc: fx.Node) -> tuple[fx.Node, float]:
    """The scale of a whole tensor, and what it is multiplied by."""
    if enc.target is aten.mul.Tensor and isinstance(arguments(enc)[1], float):
        return input_of(enc), arguments(enc)[1]
    return enc, 1.0


def _fill_vector(bias: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return fill_vector(bias, right.t())


def _cut(y: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return y[: left.shape[0], : right.shape[0]]
