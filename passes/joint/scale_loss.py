"""Multiply the gradients that enter a graph by the loss scale, and divide those that leave it."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8_compile.kernels.overflow import largest_magnitude, raise_overflow_op
from fp8_compile.torch_internals.aot import gradients, is_tangent, named_inputs

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit, inline, value
from ..graph.fp8_gemm import fp8_gemm
from ..graph.loss_scale import FACTORS, INVERSE, OVERFLOW, SCALE
from ..graph.marks import Kind, Mark
from ..graph.roles import Names
from ..graph.views import RESHAPES, TRANSPOSES
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten

IN_BACKWARD = {"partitioner_tag": "must_be_in_backward"}


class ScaleLoss(GraphPass):
    """Run a graph's backward on gradients that are ``loss_scale`` times as large, which is not seen from outside.

    Before:  dx = f(tangent)
             return [..., dx]
    After:   dx = f(convert_element_type(float(tangent) * factors[0], bf16))
             dx' = convert_element_type(float(dx) * factors[1], bf16)
             overflow' = fp8_compile.raise_overflow(overflow, [max |dx'|, ...])
             copy_(overflow, overflow')
             return [..., dx']

    A power of two changes exponents alone, so the result is the same bit for bit as long as nothing inside overflows
    or underflows. Where ``dx`` comes out of an FP8 gemm with one scale per tensor, the division goes into that scale.
    ``wide``: gradients of FP16 parameters leave in FP32, for parameters whose ``grad_dtype`` is FP32; in FP16 what the
    loss scale has saved inside would be lost on leaving.
    """

    def __init__(self, names: Names, *, wide: bool = False) -> None:
        self.names, self.wide = names, wide

    def run(self, graph: fx.Graph) -> PassReport:
        inputs = graph.find_nodes(op="placeholder")
        named = named_inputs(graph)
        tangents = [node for node in inputs if is_tangent(node)]
        if FACTORS not in named or not tangents:
            return PassReport(0, "gradients scaled")
        scaling = _Scaling(graph, named[FACTORS], named[OVERFLOW], after=tangents[-1])
        for tangent in tangents:
            scaling.enter(tangent)
        left = scaling.leave(self._wide_gradients(graph, inputs))
        return PassReport(len(tangents) + left, "gradients scaled")

    def _wide_gradients(self, graph: fx.Graph, inputs: list[fx.Node]) -> set[int]:
        """Which outputs are to leave in FP32."""
        if not self.wide:
            return set()
        parameters = {node.meta.get("desc") for node in inputs if self.names.parameters_of(node)}
        return {index for index, grad_of in gradients(graph) if grad_of in parameters}


@dataclasses.dataclass
class _Scaling:
    graph: fx.Graph
    factors: fx.Node
    overflow: fx.Node
    after: fx.Node

    def __post_init__(self) -> None:
        with self.graph.inserting_after(self.after):
            inverse = emit(self.graph, aten.select.int, self.factors, 0, INVERSE, like=self.factors, tags=IN_BACKWARD)
        with self.graph.inserting_after(self.after):
            scale = emit(self.graph, aten.select.int, self.factors, 0, SCALE, like=self.factors, tags=IN_BACKWARD)
        self.scale, self.inverse, self.last = scale, inverse, inverse

    def enter(self, tangent: fx.Node) -> None:
        if not _is_scaled(tangent):
            return
        users, dtype = list(tangent.users), value(tangent).dtype
        with self.graph.inserting_before(self.last.next):
            scaled = inline(self.graph, times, tangent, self.scale, dtype, like=tangent, tags=IN_BACKWARD)
        for user in users:
            user.replace_input_with(tangent, scaled)

    def leave(self, wide: set[int]) -> int:
        output = self.graph.output_node()
        results = list(arguments(output)[0])
        done: dict[tuple[fx.Node, bool], fx.Node] = {}
        for index, _ in gradients(self.graph):
            gradient = results[index]
            if not isinstance(gradient, fx.Node) or not _is_scaled(gradient):
                continue
            widens = index in wide and value(gradient).dtype == torch.float16
            key = gradient, widens
            if key not in done:
                done[key] = self._unscaled(gradient, widens)
            results[index] = done[key]
        output.args = (results,)
        # There is no reduction of a sparse gradient; what runs at the optimizer's step looks at its values.
        dense = [node for node in done.values() if value(node).layout == torch.strided]
        flagged = [node for node in dense if not statically_known_true(value(node).numel() == 0)]
        if flagged:
            self._raise_flag(flagged)
        return len(done)

    def _unscaled(self, gradient: fx.Node, widens: bool) -> fx.Node:
        gemm = None if widens else _gemm_before(gradient)
        if gemm is not None:
            with self.graph.inserting_before(gemm):
                dequant_scale = emit(self.graph, aten.mul.Tensor, gemm.args[3], self.inverse, like=gemm)
            gemm.update_arg(3, dequant_scale)
            return gradient
        dtype = torch.float32 if widens else value(gradient).dtype
        with self.graph.inserting_before(self.graph.output_node()):
            return inline(self.graph, times, gradient, self.inverse, dtype, like=gradient, tags=IN_BACKWARD)

    def _raise_flag(self, gradients: list[fx.Node]) -> None:
        graph, flag, mark = self.graph, self.overflow, Mark(kind=Kind.OVERFLOW)
        with graph.inserting_before(graph.output_node()):
            found = [
                inline(graph, largest_magnitude, node, like=flag, tags=IN_BACKWARD, mark=mark) for node in gradients
            ]
            raised = emit(graph, raise_overflow_op, flag, found, like=flag, tags=IN_BACKWARD)
            emit(graph, aten.copy_.default, flag, raised, like=flag, tags=IN_BACKWARD)


def _gemm_before(node: fx.Node) -> fx.Node | None:
    """The FP8 gemm whose only result is this gradient, if its scales can take one more factor."""
    while node.op == "call_function" and len(node.users) == 1:
        if (gemm := fp8_gemm(node)) is not None:
            return node if value(gemm.scale_right).numel() == 1 and gemm.bias is None else None
        if node.target not in RESHAPES | TRANSPOSES:
            return None
        node = input_of(node)
    return None


def _is_scaled(node: fx.Node) -> bool:
    """True for all gradients, complex ones too: none may be scaled on entry and left as it is on exit."""
    return isinstance(value(node), torch.Tensor) and (value(node).is_floating_point() or value(node).is_complex())


def times(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x * factor`` in FP32, or in what is wider: FP64 and complex numbers lose nothing."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) * factor).to(dtype)
