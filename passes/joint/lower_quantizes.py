"""Turn quantize nodes into the operations that Inductor fuses."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8_compile.kernels.quantize import Block, cast, quantize_op, scales, spread
from fp8_compile.kernels.stochastic_cast import cast_stochastic

from ..graph.emit import inline
from ..graph_pass import GraphPass, PassReport
from .multiply_fp8 import lower_quantize_inputs

SCALES, CAST = "scales", "cast"  # values of meta["fp8_kind"]: which half of a quantize a node belongs to


class LowerQuantizes(GraphPass):
    """Replace each quantize node with its formula (``kernels/quantize.py``).

    Before:  q, s = fp8_compile.quantize(x, float8_e4m3fn, [-1, -1])
    After:   amax = clamp_min(amax(abs(x)), 1e-12);  quant_scale = reciprocal(amax) * 448
             s = reciprocal(quant_scale) + amax * 0
             q = convert_element_type(clamp(x * quant_scale, -448, 448), float8_e4m3fn)

    As plain ops the partitioner knows that q is cheap: it saves q, a byte an element, or computes it again in
    backward from what is saved anyway. The scales are always saved, so that nothing is reduced twice.
    On a GPU Inductor fuses the cast into the producer of x and the amax into the reduction before it. The inputs of
    packed FP8 weights (``quantize_inputs``) stay one call on a CPU.
    """

    def __init__(self, target: str = "cpu") -> None:
        self.target = target

    def run(self, graph: fx.Graph) -> PassReport:
        nodes = graph.find_nodes(op="call_function", target=quantize_op)
        for node in nodes:
            x, dtype, block = node.args
            arguments = {"fp8_arguments": (dtype, tuple(block))}
            with graph.inserting_before(node):
                tags = {"fp8_kind": SCALES, **arguments}
                quant_scale, dequant_scale = inline(graph, scales, x, dtype, block, like=node, tags=tags)
                for index, scale in enumerate((quant_scale, dequant_scale)):
                    scale.meta.update(fp8_scale=index, recompute=CheckpointPolicy.MUST_SAVE)
                if node.meta.get("fp8_stochastic"):
                    q = inline(graph, _cast_stochastic, x, quant_scale, dtype, block, like=node)
                else:
                    tags = {"fp8_kind": CAST, **arguments}
                    q = inline(graph, cast, x, quant_scale, dtype, block, like=node, tags=tags)
            if node.meta.get("fp8_saved"):
                q.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            results = (q, dequant_scale)
            for user in list(node.users):
                assert user.target is operator.getitem, user.format_node()
                user.replace_all_uses_with(results[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)
        inputs = lower_quantize_inputs(graph) if self.target != "cpu" else 0
        return PassReport(len(nodes) + inputs, "quantizes lowered")


def _cast_stochastic(
    x: torch.Tensor, quant_scale: torch.Tensor, dtype: torch.dtype, block: Block
) -> torch.Tensor:
    return cast_stochastic(x, spread(quant_scale, x.shape, block), dtype)


def is_scale(node: fx.Node) -> bool:
    """Whether a node is part of the first half of a quantize. A placeholder that stands for a saved one is not."""
    return node.op == "call_function" and node.meta.get("fp8_kind") == SCALES


def source_of_scale(node: fx.Node) -> fx.Node:
    """The tensor that an amax or a scale is computed from. Of a constant, such as the zeros that a recurrence begins
    with, Inductor has computed the magnitudes ahead: a node of ours that reads no other stands for it."""
    while is_scale(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
