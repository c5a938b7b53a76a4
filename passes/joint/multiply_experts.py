"""Products with packed stacks of experts read the packed form, and of it only the experts that rows go to."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import fx

from fp8_compile.kernels import experts
from fp8_compile.torch_internals.graphs import OpOverload, op_name, schema_name

from ..graph.emit import NEVER_SAVED, emit, value
from ..graph.marks import set_mark
from ..graph.roles import Names, is_backward
from ..graph.row import REWRITTEN, Row, code_line
from ..graph_pass import GraphPass, PassReport

aten, prims = torch.ops.aten, torch.ops.prims
CASTS = (prims.convert_element_type.default, aten._to_copy.default)
DEQUANTIZES = {experts.nvfp4_dequantize_op: "nvfp4", experts.fp8_dequantize_op: "fp8"}
WHICH = {experts.nvfp4_dequantize_op: 6, experts.fp8_dequantize_op: 3}  # the place of that argument
# transformers' own op stands for _grouped_mm where that can't be compiled: any dtype but bf16.
GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StackNames(Names, Protocol):
    """What this pass asks about names, too."""

    def buffers_of(self, placeholder: fx.Node) -> tuple[str, ...]: ...


@dataclasses.dataclass(frozen=True)
class Stack:
    """``matrices = dequantize(...)[which]``, perhaps transposed."""

    dequantize: fx.Node
    which: fx.Node | None  # None: all of them
    flipped: bool  # [.., K, N]


@dataclasses.dataclass(frozen=True)
class ExpertsProduct:
    """``result[row] = x[row] @ w[expert of the row].T``."""

    node: fx.Node
    x: fx.Node  # [M, K], or with a dimension of 1 at ``dim``
    stack: Stack
    which: fx.Node
    rows: str  # "grouped" or "gathered"
    dim: int | None = None  # of a bmm, where rows of x and of the result have a dimension of 1

    @property
    def format(self) -> str:
        return DEQUANTIZES[self.stack.dequantize.target]  # type: ignore[index]

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """(E, M, N, K)."""
        count, n, k = value(self.stack.dequantize).shape
        return count, value(self.node).shape[0], n, k


class MultiplyExperts(GraphPass):
    """Replace products with a dequantized stack by one op that reads the packed one; on a GPU see below.

    Before:  w: bf16[E, N, K] = nvfp4_dequantize_experts(codes, block_scales, global_scale, K, bf16, layout)
             y: bf16[M, N] = _grouped_mm(x, permute(w, [0, 2, 1]), ends)
             z: bf16[M, N, 1] = bmm(index(w, [which]), unsqueeze(x, -1))
    After:   y: bf16[M, N] = nvfp4_experts_mm(x, codes, block_scales, global_scale, ends, "grouped", layout)
             z: bf16[M, N, 1] = unsqueeze(nvfp4_experts_mm(x, ..., which, "gathered", layout), -1)

    The same for FP8. Where experts are looked up and something else becomes of them, and for GPUs, which have no such
    product here, those alone are dequantized: ``index(w, [which])`` is ``nvfp4_dequantize_experts(..., which)``. A
    gradient's product with the stack stays as it is, on a stack that backward dequantizes anew.
    """

    def __init__(self, names: StackNames, target: str = "cpu") -> None:
        self.names, self.target = names, target
        self.rows: list[Row] = []

    @staticmethod
    def applies(graph: fx.Graph) -> bool:
        """Whether the graph has packed stacks."""
        return any(node.target in DEQUANTIZES for node in graph.nodes)

    def run(self, graph: fx.Graph) -> PassReport:
        found = [product for node in graph.nodes if (product := find_product(node)) is not None]
        found = found if self.target == "cpu" else []
        for product in found:
            module = self.names.module_of(product.node)
            set_mark(product.node, site=product.node.name, module=module, gemm="output")
            self.rows.append(self._row(product, module))
            _replace(graph, product)
        graph.eliminate_dead_code()
        lookups = [node for node in graph.nodes if _is_lookup(node)]
        for node in lookups:
            _look_up_packed(graph, node)
        for node in graph.nodes:
            if node.target in DEQUANTIZES and node.users and all(is_backward(user) for user in node.users):
                node.meta.update(NEVER_SAVED)
        return PassReport(len(found) + len(lookups), "products with and lookups in packed experts")

    def _row(self, product: ExpertsProduct, module: str) -> Row:
        node = product.node
        codes = self.names.buffers_of(product.stack.dequantize.args[0])  # type: ignore[arg-type]
        inputs = str(value(product.x).dtype).removeprefix("torch.")
        return Row(
            module,
            "output",
            tuple(size if isinstance(size, int) else str(size) for size in product.shape),
            REWRITTEN,
            f"packed experts: {product.format}, inputs {inputs}; rows {product.rows}",
            op=op_name(node),
            weight=codes[0] if codes else "",
            formats=(inputs, "e2m1" if product.format == "nvfp4" else "e4m3"),
            node=node.name,
            code=code_line(node),
        )


def find_product(node: fx.Node) -> ExpertsProduct | None:
    """The product of a node with a stack of experts, if it is one."""
    if not isinstance(node.target, OpOverload) or is_backward(node):
        return None
    if schema_name(node) in GROUPED:
        return _grouped(node)
    return _gathered(node) if node.target is aten.bmm.default else None


def _grouped(node: fx.Node) -> ExpertsProduct | None:
    x, weight, ends, *rest = (*node.args, *node.kwargs.values())
    stack = _stack_behind(weight)
    if any(one is not None for one in rest) or stack is None or stack.which is not None or not stack.flipped:
        return None
    if value(x).dim() != 2 or value(x).dtype not in _DTYPES:  # type: ignore[arg-type]
        return None
    return ExpertsProduct(node, x, stack, ends, "grouped")  # type: ignore[arg-type]


def _gathered(node: fx.Node) -> ExpertsProduct | None:
    left, right = node.args
    for x, weight, dim, flipped in ((right, left, 2, False), (left, right, 1, True)):
        stack = _stack_behind(weight)
        if stack is None or stack.which is None or stack.flipped != flipped or value(stack.which).dim() != 1:
            continue
        if value(x).shape[dim] == 1 and value(x).dtype in _DTYPES:  # type: ignore[arg-type]
            return ExpertsProduct(node, x, stack, stack.which, "gathered", dim)  # type: ignore[arg-type]
    return None


def _stack_behind(node: object) -> Stack | None:
    """The stack that an operand is made of, transposing, casts and one lookup aside."""
    flipped, which = False, None
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in DEQUANTIZES:
            return Stack(node, which, flipped) if len(node.args) <= WHICH[node.target] else None  # type: ignore[index]
        if _flips(node):
            flipped = not flipped
        elif which is None and _looked_up(node) is not None:
            which = _looked_up(node)
        elif node.target not in CASTS:
            return None
        node = node.args[0]
    return None


def _flips(node: fx.Node) -> bool:
    """Whether a node swaps the last two dimensions."""
    dims = value(node).dim() if isinstance(value(node), torch.Tensor) else 0
    swapped = [*range(dims - 2), dims - 1, dims - 2]
    if node.target is aten.permute.default:
        return dims > 2 and [one % dims for one in node.args[1]] == swapped  # type: ignore[union-attr, operator]
    return node.target is aten.transpose.int and {one % dims for one in node.args[1:]} == {dims - 2, dims - 1}  # type: ignore[operator]


def _looked_up(node: fx.Node) -> fx.Node | None:
    """``which`` of ``index(w, [which])``."""
    if node.target is not aten.index.Tensor or len(node.args[1]) != 1:  # type: ignore[arg-type]
        return None
    which = node.args[1][0]  # type: ignore[index]
    return which if value(which).dtype in (torch.int32, torch.int64) else None  # type: ignore[return-value, arg-type]


def _is_lookup(node: fx.Node) -> bool:
    if node.op != "call_function" or _looked_up(node) is None:
        return False
    stack = _stack_behind(node)
    return stack is not None and value(node.args[0]).dim() == 3  # type: ignore[arg-type]


def _replace(graph: fx.Graph, product: ExpertsProduct) -> None:
    node, x, dim = product.node, product.x, product.dim
    with graph.inserting_before(node):
        if dim is not None:
            lifted = x.target is aten.unsqueeze.default and x.args[1] % 3 == dim  # type: ignore[operator]
            x = x.args[0] if lifted else emit(graph, aten.squeeze.dim, x, dim, like=node)  # type: ignore[assignment]
        if value(x).dtype != value(node).dtype:
            x = emit(graph, prims.convert_element_type.default, x, value(node).dtype, like=node)
        result = _multiplied(graph, product, x)
        if dim is not None:
            result = emit(graph, aten.unsqueeze.default, result, dim, like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _multiplied(graph: fx.Graph, product: ExpertsProduct, x: fx.Node) -> fx.Node:
    packed, choice = product.stack.dequantize.args, (product.which, product.rows)
    if product.format == "nvfp4":
        codes, block_scales, global_scale, _, _, layout = packed
        arguments = (codes, block_scales, global_scale, *choice, layout)
        return emit(graph, experts.nvfp4_mm_op, x, *arguments, like=product.node)
    codes, scales, _ = packed
    return emit(graph, experts.fp8_mm_op, x, codes, scales, *choice, like=product.node)


def _look_up_packed(graph: fx.Graph, node: fx.Node) -> None:
    stack, dtype = _stack_behind(node), value(node).dtype
    assert stack is not None
    with graph.inserting_before(node):
        result = emit(graph, stack.dequantize.target, *stack.dequantize.args, stack.which, like=node)  # type: ignore[arg-type]
        if stack.flipped:
            dims = value(result).dim()
            result = emit(graph, aten.permute.default, result, [*range(dims - 2), dims - 1, dims - 2], like=node)
        if value(result).dtype != dtype:
            result = emit(graph, prims.convert_element_type.default, result, dtype, like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
