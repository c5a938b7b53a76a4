"""Turn quantize nodes into the operations that Inductor fuses."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8_compile.kernels.cpu.quantize import scales_op, whole_scale_op
from fp8_compile.kernels.dequantize_operand import FORMULAS
from fp8_compile.kernels.nvfp4.inputs import round_inputs_op as nvfp4_round_op
from fp8_compile.kernels.nvfp4.inputs import written_out
from fp8_compile.kernels.nvfp4_training import LARGEST, global_scale, global_scale_op
from fp8_compile.kernels.quantize import WHOLE, Block, cast, quantize_op, scales, spread
from fp8_compile.kernels.stochastic_cast import cast_stochastic

from ..graph.arguments import arguments, input_of
from ..graph.call_cast import call_cast
from ..graph.emit import emit, getitem, inline, replace_results
from ..graph.marks import Kind, Mark, mark_of, set_mark
from ..graph_pass import GraphPass, PassReport
from .multiply_fp8 import lower_quantize_inputs


class LowerQuantizes(GraphPass):
    """Replace each quantize node with its formula (``kernels/quantize.py``).

    Before:  q, s = fp8_compile.quantize(x, float8_e4m3fn, [-1, -1])
    After:   amax = clamp_min(amax(abs(x)), 1e-12);  quant_scale = reciprocal(amax) * 448
             s = reciprocal(quant_scale) + amax * 0
             q = convert_element_type(clamp(x * quant_scale, -448, 448), float8_e4m3fn)

    The partitioner knows that q is cheap when it is made of plain ops: it saves q, one byte per element, or computes it
    again in backward from what is saved anyway. The scales are always saved, so that nothing is reduced twice.
    On a GPU Inductor fuses the cast into the producer of x and the amax into the reduction before it.

    ``calls``: on a CPU, where the partitioner can be told that our own cast is cheap (``cheap_ops.py``),
    two calls of C++ do for all of that. Fewer nodes take less time to compile.
    After:   quant_scale, s = fp8_compile.scales(x);  q = fp8_compile.cast(x, quant_scale)

    NVFP4:   enc, dequant, _ = fp8_compile.whole_scale(x, None, 6.0)

    With a scale per row the ops stay plain: of a quantize that is for backward alone, the partitioner weighs what it
    reads by how many operations there are, and would save x in bf16. Tiles are left to Inductor.

    The inputs of packed FP8 weights (``quantize_inputs``) stay one call on a CPU. What codes stand for, in products of
    backward that read them in high precision, is made of plain ops too, and never saved.
    """

    leaves_no = (quantize_op, global_scale_op, *FORMULAS)

    def __init__(self, target: str = "cpu", *, calls: bool = False) -> None:
        self.target, self.calls = target, calls

    def run(self, graph: fx.Graph) -> PassReport:
        nodes = graph.find_nodes(op="call_function", target=quantize_op)
        for node in nodes:
            with graph.inserting_before(node):
                whole = list(arguments(node)[2]) == [WHOLE, WHOLE]
                results = _called(graph, node) if self.calls and whole else _lowered(graph, node)
            replace_results(graph, node, results)
        global_scales = graph.find_nodes(op="call_function", target=global_scale_op)
        for node in global_scales:
            with graph.inserting_before(node):
                results = _whole(graph, node, calls=self.calls)
            replace_results(graph, node, results)
        dequantized = _lower_dequantizes(graph)
        inputs = lower_quantize_inputs(graph) if self.target != "cpu" else 0
        rounds = graph.find_nodes(op="call_function", target=nvfp4_round_op)
        for node in rounds:
            with graph.inserting_before(node):
                result = inline(graph, written_out, *node.args, like=node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
        inputs += len(rounds)
        return PassReport(len(nodes) + len(global_scales) + dequantized + inputs, "quantizes lowered")


def _lower_dequantizes(graph: fx.Graph) -> int:
    lowered = 0
    for op, formula in FORMULAS.items():
        for node in graph.find_nodes(op="call_function", target=op):
            with graph.inserting_before(node):
                node.replace_all_uses_with(inline(graph, formula, *node.args, like=node))
            graph.erase_node(node)
            lowered += 1
    return lowered


def _lowered(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """q and dequant_scale as plain, marked ops."""
    x, dtype, block = arguments(node)
    lowered = dtype, tuple(block)
    mark = Mark(kind=Kind.SCALES, quantize=lowered)
    quant_scale, dequant_scale = inline(graph, scales, x, dtype, block, like=node, mark=mark)
    for index, scale in enumerate((quant_scale, dequant_scale)):
        set_mark(scale, scale=index)
        scale.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if mark_of(node).stochastic:
        q = inline(graph, _cast_stochastic, x, quant_scale, dtype, block, like=node)
    else:
        mark = Mark(kind=Kind.CAST, quantize=lowered)
        q = inline(graph, cast, x, quant_scale, dtype, block, like=node, mark=mark)
    if mark_of(node).saved:
        q.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return q, dequant_scale


def _called(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The same as calls of ``kernels/cpu``."""
    x, dtype, block = arguments(node)
    call = emit(graph, scales_op, x, dtype, block, like=node)
    call.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    quant_scale, dequant_scale = (getitem(graph, call, which) for which in (0, 1))
    if mark_of(node).stochastic:
        q = inline(graph, _cast_stochastic, x, quant_scale, dtype, block, like=node)
    else:
        q = call_cast(graph, x, quant_scale, dtype, block, like=node)
    if mark_of(node).saved:
        q.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return q, dequant_scale


def _whole(graph: fx.Graph, node: fx.Node, *, calls: bool) -> tuple[fx.Node, fx.Node]:
    """enc and dequant of a whole tensor in NVFP4, saved for backward."""
    if calls:
        made = [emit(graph, whole_scale_op, input_of(node), None, LARGEST, like=node)]
        enc, dequant = (getitem(graph, made[0], which) for which in (0, 1))
    else:
        enc, dequant = made = inline(graph, global_scale, input_of(node), like=node)
    for result in made:
        result.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return enc, dequant


def _cast_stochastic(x: torch.Tensor, quant_scale: torch.Tensor, dtype: torch.dtype, block: Block) -> torch.Tensor:
    return cast_stochastic(x, spread(quant_scale, x.shape, block), dtype)
