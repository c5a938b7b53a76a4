"""Let operations that are not linear in the gradients see them without the loss scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8_compile.torch_internals.aot import is_tangent, named_inputs
from fp8_compile.torch_internals.graphs import op_name, schema_name

from ..graph.arguments import arguments
from ..graph.emit import emit, inline, value
from ..graph.loss_scale import FACTORS, INVERSE, SCALE
from ..graph_pass import GraphPass, PassReport
from .scale_loss import IN_BACKWARD, times

aten = torch.ops.aten

# Names of ops, whatever their overload. Ops that pass a positive factor on (abs, amax, relu, norms) are not among them.
BENT = frozenset(
    "clamp clamp_min clamp_max hardtanh sign sgn pow sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p tanh "
    "sigmoid sin cos erf atan round floor ceil trunc nan_to_num _softmax _log_softmax var var_mean std "
    "gt lt ge le eq ne".split()
)
PRODUCTS = frozenset("mul mm bmm mv dot addmm baddbmm".split())  # linear in each operand, not in two of them
SUMS = frozenset("add sub rsub minimum maximum fmin fmax where".split())  # linear if all of them are gradients, or zero
CONSTANTS = frozenset("full full_like scalar_tensor zeros zeros_like new_zeros".split())


class UnscaleNonlinear(GraphPass):
    """Divide the gradients that a nonlinear operation reads by the loss scale, and multiply its result by it.

    Before:  g' = clamp(g, -1, 1)
    After:   g' = convert_element_type(float(clamp(convert_element_type(float(g) * factors[1]), -1, 1)) * factors[0])

    A backward is linear in the gradients that enter it, so that it can't tell that they are scaled, unless a user has
    made it otherwise: by a hook on a tensor, by an ``autograd.Function`` that clips. Whatever is computed from
    gradients is ``loss_scale`` times as large as without a loss scale; this has to be undone only around such
    operations.
    The pass comes first, when nothing but the user's operations is in the graph.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        inputs = graph.find_nodes(op="placeholder")
        factors = named_inputs(graph).get(FACTORS)
        flows = {node for node in inputs if is_tangent(node)}
        found = []
        for node in graph.nodes:
            if node.op != "call_function" or flows.isdisjoint(node.all_input_nodes):
                continue
            if is_nonlinear(node, flows):
                found.append(node)
            if _carries(node):
                flows.add(node)
        if factors is None or not found:
            return PassReport(0, "operations unscaled")
        scale, inverse = (self._factor(graph, factors, index, inputs[-1]) for index in (SCALE, INVERSE))
        for node in found:
            self._unscale(graph, node, flows, scale, inverse)
        return PassReport(len(found), "operations unscaled")

    def _factor(self, graph: fx.Graph, factors: fx.Node, index: int, after: fx.Node) -> fx.Node:
        with graph.inserting_after(after):
            return emit(graph, aten.select.int, factors, 0, index, like=factors, tags=IN_BACKWARD)

    def _unscale(self, graph: fx.Graph, node: fx.Node, flows: set[fx.Node], scale: fx.Node, inverse: fx.Node) -> None:
        with graph.inserting_before(node):
            for arg in [one for one in node.all_input_nodes if one in flows]:
                dtype = value(arg).dtype
                node.replace_input_with(arg, inline(graph, times, arg, inverse, dtype, like=node, tags=IN_BACKWARD))
        if not _carries(node):  # a comparison
            return
        users = list(node.users)
        with graph.inserting_before(node.next):
            scaled = inline(graph, times, node, scale, value(node).dtype, like=node, tags=IN_BACKWARD)
        flows.add(scaled)
        for user in users:
            user.replace_input_with(node, scaled)


def is_nonlinear(node: fx.Node, flows: set[fx.Node]) -> bool:
    """True for an op whose result does not have the factor that all gradients it reads have in common."""
    if not schema_name(node).startswith("aten::"):
        return False
    name = op_name(node)
    if name in BENT:
        return True
    operands = [arg for arg in node.args if isinstance(arg, (fx.Node, int, float, complex))]
    if name in PRODUCTS:
        multiplied = operands[1:3] if name in ("addmm", "baddbmm") else operands[:2]
        return all(arg in flows for arg in multiplied)
    if name == "div":
        return operands[1] in flows
    if name in SUMS:
        added = operands[1:3] if name == "where" else operands[:2]
        return not all(arg in flows or _is_zero(arg) for arg in added)
    return False


def _carries(node: fx.Node) -> bool:
    """True if the result has the factor of the gradients that it is made of; truth values and indices don't."""
    result = node.meta.get("val")
    parts = result if isinstance(result, (tuple, list)) else [result]
    return any(isinstance(one, torch.Tensor) and (one.is_floating_point() or one.is_complex()) for one in parts)


def _is_zero(arg: Any) -> bool:
    if not isinstance(arg, fx.Node):
        return arg == 0
    if not schema_name(arg):
        return False
    name = op_name(arg)
    if name in ("expand", "view", "reshape", "_to_copy", "convert_element_type", "clone"):
        return _is_zero(arg.args[0])
    if name not in CONSTANTS:
        return False
    return "zeros" in name or arguments(arg)[0 if name == "scalar_tensor" else 1] == 0
