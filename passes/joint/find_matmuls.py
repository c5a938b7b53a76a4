"""Find every matmul of a joint graph, and say which module it belongs to, which of the three gemms it is, and what its
operands are.

    output      y  = x @ w          forward
    grad_input  dx = dy @ w^T       backward, linked to its forward matmul by autograd's sequence number
    grad_weight dw = x^T @ dy       likewise

Nothing is edited here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
from typing import Any, Callable, Sequence

import torch
from torch import fx

from fp8_compile.torch_internals.aot import is_tangent, is_token
from fp8_compile.torch_internals.graphs import OpOverload

from ..graph.arguments import arguments, input_of
from ..graph.emit import value
from ..graph.groups import GroupedProduct, grouped_product, is_both_gradients, written_as
from ..graph.marks import Kind, marked
from ..graph.matmul import GroupedMatmul, Matmul, Operand, OtherMatmul
from ..graph.roles import Names, Origin, Role, is_backward
from ..graph.row import Gemm, code_path
from ..graph.views import root_of

aten = torch.ops.aten


# Position of (left, right, added) among the arguments.
MATMUL_OPS: dict[Callable[..., object], tuple[int, int, int | None]] = {
    aten.mm.default: (0, 1, None),
    aten.bmm.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
    aten.baddbmm.default: (1, 2, 0),
}
RAGGED_GROUPS = "ragged groups: not in the form [T, K] by [experts, K, N]"
FUSED_ATTENTION = "attention kernel: activation by activation stays in high precision"
OTHER_OPS: dict[str, str] = {
    "_scaled_mm": "the model's own FP8 matmul",
    "_scaled_grouped_mm": "the model's own FP8 matmul",
    "_int_mm": "integer matmul",
    "_native_multi_head_attention": "opaque attention op",
    "_transformer_encoder_layer_fwd": "opaque transformer op",
}
GATHERS = {aten.index.Tensor, aten.index_select.default, aten.gather.default}


def find_matmuls(graph: fx.Graph, names: Names) -> list[Matmul | OtherMatmul]:
    """All matmuls in graph order, forward before backward."""
    values = _trace_origins(graph, names)
    of_weights = _sequence_numbers_of_weights(values)
    found: list[Matmul | OtherMatmul] = []
    forward_by_seq: dict[int, list[Matmul]] = {}
    done: collections.Counter[tuple[str, ...]] = collections.Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        module = names.module_of(node)
        grouped = grouped_product(node)
        if node.target in MATMUL_OPS or grouped is not None:
            site = _with_ordinals(_matmul(node, module, grouped, values, forward_by_seq), done)
            site = dataclasses.replace(site, makes_weight=_makes_weight(site, of_weights))
            if not is_backward(node) and "seq_nr" in node.meta:
                forward_by_seq.setdefault(node.meta["seq_nr"], []).append(site)
            found.append(site)
        elif (reason := _other_reason(node)) is not None:
            found.append(OtherMatmul(node, written_as(node), module, _other_gemm(node), reason, _other_shape(node)))
    return found


@dataclasses.dataclass(frozen=True)
class _Value:
    origin: Origin
    weights: tuple[str, ...] = ()  # parameters that it is made of, while it is made of nothing that flows


def _trace_origins(graph: fx.Graph, names: Names) -> dict[fx.Node, _Value]:
    values: dict[fx.Node, _Value] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = _Value(_placeholder_origin(node, names), names.weights_of(node))
        elif node.op != "output":
            inputs = [values[arg] for arg in node.all_input_nodes]
            origin = functools.reduce(operator.or_, (item.origin for item in inputs), Origin.CONSTANT)
            weights = dict.fromkeys(name for item in inputs for name in item.weights) if origin.is_weight else ()
            values[node] = _Value(origin, tuple(weights))
    return values


def _placeholder_origin(node: fx.Node, names: Names) -> Origin:
    if is_tangent(node) or node.name.startswith("tangents"):
        return Origin.GRADIENT
    if names.weights_of(node):
        return Origin.PARAMETER
    if is_token(node):
        return Origin.CONSTANT
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return Origin.CONSTANT  # a symbolic size says nothing about where data comes from
    return Origin.BUFFER if names.is_buffer(node) else Origin.INPUT


def _matmul(
    node: fx.Node,
    module: str,
    grouped: GroupedProduct | None,
    values: dict[fx.Node, _Value],
    forward_by_seq: dict[int, list[Matmul]],
) -> Matmul:
    left, right, added = (grouped.left.node, grouped.right.node, None) if grouped else operands_of(node)
    forward = None
    if is_backward(node):
        forward = _forward_of(node, left, right, forward_by_seq)
        gemm, roles = _backward_roles(left, right, forward, values)
    else:
        gemm, roles = "output", _forward_roles(left, right, values)
    sides = [_operand(side, role, values) for side, role in zip((left, right), roles)]
    weights = next((values[side.node].weights for side in sides if side.role is Role.WEIGHT), ())
    fields: dict[str, Any] = {
        "node": node,
        "op": written_as(node),
        "module": module or (forward.module if forward else _owner(node, weights)),
        "gemm": gemm,
        "left": sides[0],
        "right": sides[1],
        "added": added,
        "alpha": node.kwargs.get("alpha", 1.0),
        "beta": node.kwargs.get("beta", 1.0),
        "weights": weights or (forward.weights if forward else ()),
        "forward": forward,
    }
    return GroupedMatmul(**fields, product=grouped) if grouped else Matmul(**fields)


def _operand(node: fx.Node, role: Role, values: dict[fx.Node, _Value]) -> Operand:
    return Operand(node, role, values[node].origin, root_of(node), _is_gathered(node, values))


def _makes_weight(site: Matmul, of_weights: set[int]) -> bool:
    """True for a matmul that computes a weight, such as ``W + B @ A`` in a parametrization, or is part of the gradient
    of one that does."""
    if not is_backward(site.node):
        return not site.left.origin.flows and not site.right.origin.flows
    if site.forward is not None:
        return site.forward.makes_weight
    return site.node.meta.get("seq_nr") in of_weights


def _sequence_numbers_of_weights(values: dict[fx.Node, _Value]) -> set[int]:
    """The sequence numbers of operations in forward that read nothing but weights. A backward matmul without a forward
    one, as in the gradient of ``matrix_exp``, has the number of the operation whose gradient it is part of."""
    weights, flowing = set[int](), set[int]()
    for node, one in values.items():
        if not is_backward(node) and "seq_nr" in node.meta:
            (flowing if one.origin.flows else weights).add(node.meta["seq_nr"])
    return weights - flowing


def _owner(node: fx.Node, weights: tuple[str, ...]) -> str:
    """The module whose parameter is multiplied, for a product that was not written in a module but in a function, or by
    ``torch.func.grad``, whose backward is traced as one op without a module."""
    if node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"):
        return ""  # in the compiled module itself
    return weights[0].rpartition(".")[0] if weights else ""


def _with_ordinals(site: Matmul, done: collections.Counter[tuple[str, ...]]) -> Matmul:
    """Count the matmul among those of its module, and among those of its parameter and line."""
    if (forward := site.forward) is not None:
        same = {field: getattr(forward, field) for field in ("number", "line", "ordinal", "weights")}
        return dataclasses.replace(site, **same)
    line = code_path(site.node)
    in_module, on_line = (site.module, site.gemm), (site.parameter or site.module, line, site.gemm)
    done.update((in_module, on_line))
    return dataclasses.replace(site, number=done[in_module] - 1, line=line, ordinal=done[on_line] - 1)


def operands_of(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Left, right and added operand of a matmul, as they are now: an edit may have replaced them."""
    assert callable(node.target), node.format_node()
    at_left, at_right, at_added = MATMUL_OPS[node.target]
    added = None if at_added is None else input_of(node, at_added)
    return input_of(node, at_left), input_of(node, at_right), added


def _is_gathered(node: fx.Node, values: dict[fx.Node, _Value]) -> bool:
    root = root_of(node)
    return root.target in GATHERS and values[input_of(root)].origin.is_weight


def _forward_roles(left: fx.Node, right: fx.Node, values: dict[fx.Node, _Value]) -> tuple[Role, Role]:
    """The parameter is the weight; if both values are parameters, or neither is, the right one is the weight."""
    left_is, right_is = (values[side].origin.is_weight or _is_gathered(side, values) for side in (left, right))
    return (Role.WEIGHT, Role.INPUT) if left_is and not right_is else (Role.INPUT, Role.WEIGHT)


def _forward_of(
    node: fx.Node, left: fx.Node, right: fx.Node, forward_by_seq: dict[int, list[Matmul]]
) -> Matmul | None:
    """The forward matmul whose gradient this is: same sequence number, and one operand in common."""
    roots = {root_of(left), root_of(right)}
    for site in forward_by_seq.get(node.meta.get("seq_nr", -1), ()):
        if roots & {site.left.root, site.right.root}:
            return site
    return None


def _backward_roles(
    left: fx.Node, right: fx.Node, forward: Matmul | None, values: dict[fx.Node, _Value]
) -> tuple[Gemm, tuple[Role, Role]]:
    flows = [bool(values[side].origin & Origin.GRADIENT) for side in (left, right)]
    grad_is_left = flows[0] or not flows[1]
    other = right if grad_is_left else left
    if forward is not None:
        role = (forward.left if root_of(other) is forward.left.root else forward.right).role
    else:
        origin = values[other].origin  # a buffer has no gradient of its own: what is multiplied by one is the input's
        role = Role.WEIGHT if origin.is_weight or origin in (Origin.BUFFER, Origin.CONSTANT) else Role.INPUT
    gemm: Gemm = "grad_input" if role is Role.WEIGHT else "grad_weight"
    return gemm, (Role.GRAD_OUTPUT, role) if grad_is_left else (role, Role.GRAD_OUTPUT)


def _other_reason(node: fx.Node) -> str | None:
    if not isinstance(node.target, OpOverload) or marked(node, Kind.GEMM):
        return None
    name = written_as(node)
    if "grouped_mm" in name and "scaled" not in name:
        return None if is_both_gradients(node) else RAGGED_GROUPS
    if node.target.namespace != "aten":
        return None
    if name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
        return FUSED_ATTENTION
    return OTHER_OPS.get(name)


def _other_gemm(node: fx.Node) -> Gemm:
    if not is_backward(node):
        return "output"
    groups_of_weights = "grouped_mm" in written_as(node) and len(_other_shape(node)) == 4 and value(node).dim() == 3
    return "grad_weight" if groups_of_weights else "grad_input"


def _other_shape(node: fx.Node) -> tuple[int | torch.SymInt, ...]:
    """(groups, M, N, K) of a grouped product; the shape of the first result of attention and of ops with several
    results."""
    result = value(node)
    first = result[0] if isinstance(result, Sequence) else result
    if not isinstance(first, torch.Tensor):
        return ()
    if "grouped_mm" not in written_as(node) or first is not result:
        return tuple(first.shape)
    left, right = (value(arg) for arg in arguments(node)[:2])
    groups = next((side.shape[0] for side in (first, left, right) if side.dim() == 3), 1)
    return (groups, left.shape[-2], right.shape[-1], left.shape[-1])
