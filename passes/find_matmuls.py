"""Find every matmul of a joint graph and say what it is: whose, which of the three gemms, with which operands.

    output      y  = x @ w          forward
    grad_input  dx = dy @ w^T       backward, linked to its forward matmul by autograd's sequence number
    grad_weight dw = x^T @ dy       likewise

Nothing is edited here.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from typing import Callable, Protocol, Sequence

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import TangentAOTInput

from .emit import value
from .row import Gemm

aten, prims = torch.ops.aten, torch.ops.prims


class Origin(enum.IntFlag):
    """What a value is computed from."""

    CONSTANT = 0
    PARAMETER = 1
    BUFFER = 2
    INPUT = 4
    GRADIENT = 8


class Role(str, enum.Enum):
    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Names(Protocol):
    """What the pass asks about names; ``fp8_compile.module_names`` knows them."""

    def module_of(self, node: fx.Node) -> str | None: ...

    def parameter_of(self, placeholder: fx.Node) -> str | None: ...

    def is_buffer(self, placeholder: fx.Node) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a matmul as the graph has it."""

    node: fx.Node
    role: Role
    origin: Origin
    root: fx.Node  # the node that its views and casts start from


@dataclasses.dataclass(frozen=True)
class Matmul:
    """``result = alpha * left @ right + beta * added``, [B?, M, K] @ [B?, K, N]."""

    node: fx.Node
    op: str
    module: str
    gemm: Gemm
    left: Operand
    right: Operand
    added: fx.Node | None = None
    alpha: float = 1.0
    beta: float = 1.0
    weight: str = ""  # dotted name of the parameter
    forward: Matmul | None = None  # of a backward matmul: the matmul it belongs to

    @property
    def batched(self) -> bool:
        return value(self.left.node).dim() == 3

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """([B,] M, N, K)."""
        left, right = value(self.left.node), value(self.right.node)
        return (*left.shape[:-1], right.shape[-1], left.shape[-1])

    @property
    def dtype(self) -> torch.dtype:
        return value(self.left.node).dtype


@dataclasses.dataclass(frozen=True)
class OtherMatmul:
    """An op that multiplies matrices in a form that is left alone: it has a row and a reason, no more."""

    node: fx.Node
    op: str
    module: str
    gemm: Gemm
    reason: str
    shape: tuple[int | torch.SymInt, ...]


# Position of (left, right, added) among the arguments.
MATMUL_OPS: dict[Callable[..., object], tuple[int, int, int | None]] = {
    aten.mm.default: (0, 1, None),
    aten.bmm.default: (0, 1, None),
    aten.addmm.default: (1, 2, 0),
    aten.baddbmm.default: (1, 2, 0),
}
FUSED_ATTENTION = "attention kernel: activation by activation stays in high precision"
OTHER_OPS: dict[str, str] = {
    "mv": "matrix by vector: one column is too small to gain",
    "addmv": "matrix by vector: one column is too small to gain",
    "dot": "vector by vector: too small to gain",
    "vdot": "vector by vector: too small to gain",
    "_grouped_mm": "ragged groups: the sizes of the groups are known only when it runs",
    "_scaled_mm": "the model's own FP8 matmul",
    "_scaled_grouped_mm": "the model's own FP8 matmul",
    "_int_mm": "integer matmul",
    "_native_multi_head_attention": "opaque attention op",
    "_transformer_encoder_layer_fwd": "opaque transformer op",
}
# Ops that move or reinterpret elements without mixing them: an operand is followed through these to its root.
LOOK_THROUGH = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.t.default,
    aten.transpose.int,
    aten.expand.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.alias.default,
    prims.convert_element_type.default,
    aten._to_copy.default,
}


def find_matmuls(graph: fx.Graph, names: Names) -> list[Matmul | OtherMatmul]:
    """All matmuls in graph order, forward before backward."""
    origins = _origins(graph, names)
    found: list[Matmul | OtherMatmul] = []
    forward_by_seq: dict[int, list[Matmul]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        module = names.module_of(node) or ""
        if node.target in MATMUL_OPS:
            site = _matmul(node, module, origins, forward_by_seq, names)
            if not is_backward(node) and "seq_nr" in node.meta:
                forward_by_seq.setdefault(node.meta["seq_nr"], []).append(site)
            found.append(site)
        elif (reason := _other_reason(node)) is not None:
            gemm: Gemm = "grad_input" if is_backward(node) else "output"
            found.append(OtherMatmul(node, _op_name(node), module, gemm, reason, _result_shape(node)))
    return found


def is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def root_of(node: fx.Node) -> fx.Node:
    """The node that a chain of views and casts starts from."""
    while node.op == "call_function" and node.target in LOOK_THROUGH:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _origins(graph: fx.Graph, names: Names) -> dict[fx.Node, Origin]:
    origins: dict[fx.Node, Origin] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            origins[node] = _placeholder_origin(node, names)
        elif node.op != "output":
            origins[node] = functools.reduce(operator.or_, (origins[arg] for arg in node.all_input_nodes), Origin.CONSTANT)
    return origins


def _placeholder_origin(node: fx.Node, names: Names) -> Origin:
    if isinstance(node.meta.get("desc"), TangentAOTInput) or node.name.startswith("tangents"):
        return Origin.GRADIENT
    if names.parameter_of(node) is not None:
        return Origin.PARAMETER
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return Origin.CONSTANT  # a symbolic size says nothing about where data comes from
    return Origin.BUFFER if names.is_buffer(node) else Origin.INPUT


def _matmul(
    node: fx.Node,
    module: str,
    origins: dict[fx.Node, Origin],
    forward_by_seq: dict[int, list[Matmul]],
    names: Names,
) -> Matmul:
    at_left, at_right, at_added = MATMUL_OPS[node.target]  # type: ignore[index]
    left, right = node.args[at_left], node.args[at_right]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    forward = None
    if is_backward(node):
        forward = _forward_of(node, left, right, forward_by_seq)
        gemm, roles = _backward_roles(left, right, forward, origins)
    else:
        gemm, roles = "output", _forward_roles(left, right, origins)
    operands = [Operand(n, role, origins[n], root_of(n)) for n, role in zip((left, right), roles)]
    site = Matmul(
        node,
        _op_name(node),
        module or (forward.module if forward else ""),
        gemm,
        operands[0],
        operands[1],
        added=None if at_added is None else node.args[at_added],  # type: ignore[arg-type]
        alpha=node.kwargs.get("alpha", 1.0),  # type: ignore[arg-type]
        beta=node.kwargs.get("beta", 1.0),  # type: ignore[arg-type]
        forward=forward,
    )
    return dataclasses.replace(site, weight=_weight_name(site, names))


def _forward_roles(left: fx.Node, right: fx.Node, origins: dict[fx.Node, Origin]) -> tuple[Role, Role]:
    """The parameter is the weight; of two values of one kind the right one is."""
    if origins[left] == Origin.PARAMETER and origins[right] != Origin.PARAMETER:
        return Role.WEIGHT, Role.INPUT
    return Role.INPUT, Role.WEIGHT


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
    left: fx.Node, right: fx.Node, forward: Matmul | None, origins: dict[fx.Node, Origin]
) -> tuple[Gemm, tuple[Role, Role]]:
    grad_is_left = bool(origins[left] & Origin.GRADIENT) or not origins[right] & Origin.GRADIENT
    other = right if grad_is_left else left
    if forward is not None:
        saved = forward.left if root_of(other) is forward.left.root else forward.right
        role = saved.role
    else:
        role = Role.WEIGHT if origins[other] == Origin.PARAMETER else Role.INPUT
    gemm: Gemm = "grad_input" if role is Role.WEIGHT else "grad_weight"
    return gemm, (Role.GRAD_OUTPUT, role) if grad_is_left else (role, Role.GRAD_OUTPUT)


def _weight_name(site: Matmul, names: Names) -> str:
    for operand in (site.left, site.right):
        if operand.role is Role.WEIGHT and operand.root.op == "placeholder":
            return names.parameter_of(operand.root) or ""
    return site.forward.weight if site.forward else ""


def _other_reason(node: fx.Node) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten":
        return None
    name = _op_name(node)
    if name.startswith(("_scaled_dot_product", "_flash_attention", "_efficient_attention")):
        return FUSED_ATTENTION
    return OTHER_OPS.get(name)


def _op_name(node: fx.Node) -> str:
    return node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]


def _result_shape(node: fx.Node) -> tuple[int | torch.SymInt, ...]:
    result = value(node)
    first = result[0] if isinstance(result, Sequence) else result
    return tuple(first.shape) if isinstance(first, torch.Tensor) else ()
