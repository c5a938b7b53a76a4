"""Products with packed weights run from the packed form."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from fp8_compile.kernels import fp8_inputs, fp8_weight
from fp8_compile.kernels.nvfp4 import ops as nvfp4
from fp8_compile.torch_internals.graphs import op_name

from ..graph.emit import NEVER_SAVED, emit, value
from ..graph.marks import set_mark
from ..graph.roles import Names, is_backward
from ..graph.row import REWRITTEN, Row, code_line
from ..graph_pass import GraphPass, PassReport
from .multiply_fp8 import multiply_fp8, reason_against_fp8

aten, prims = torch.ops.aten, torch.ops.prims
CASTS = (prims.convert_element_type.default, aten._to_copy.default)
DEQUANTIZES = {nvfp4.dequantize_op: "nvfp4", fp8_weight.dequantize_op: "fp8"}


@dataclasses.dataclass(frozen=True)
class PackedProduct:
    """``result = x @ dequantize(...).T (+ bias)``."""

    node: fx.Node
    x: fx.Node
    dequantize: fx.Node
    bias: fx.Node | None
    activations: str | None
    input_scale: fx.Node | None = None  # of activations="fp8", where it is static

    @property
    def format(self) -> str:
        return DEQUANTIZES[self.dequantize.target]  # type: ignore[index]

    @property
    def shape(self) -> tuple[int | torch.SymInt, ...]:
        """(M, N, K)."""
        m, k = value(self.x).shape
        return m, value(self.node).shape[1], k


class MultiplyPacked(GraphPass):
    """Replace the product with a dequantized weight by one op that reads the packed one.

    Before:  w: bf16[N, K] = nvfp4_dequantize(codes, block_scales, global_scale, K, bf16, layout)
             y: bf16[M, N] = addmm(bias, nvfp4_round_activations(x), permute(w))
    After:   y: bf16[M, N] = nvfp4_mm(x, codes, block_scales, global_scale, bias, activations, layout)

    The same for ``fp8_dequantize`` and ``fp8_mm``; where inputs go through ``round_inputs`` it is an FP8 gemm
    (``multiply_fp8.py``). A gradient's product with the weight stays as it is, on a weight that backward dequantizes
    anew. Every replaced product gets a :class:`Row`.
    """

    def __init__(self, names: Names, target: str = "cpu") -> None:
        self.names, self.target = names, target
        self.rows: list[Row] = []

    @staticmethod
    def applies(graph: fx.Graph) -> bool:
        """Whether the graph has packed weights."""
        return any(node.target in DEQUANTIZES for node in graph.nodes)

    def run(self, graph: fx.Graph) -> PassReport:
        found = [product for node in graph.nodes if (product := _packed_product(node)) is not None]
        for product in found:
            module = self.names.module_of(product.node)
            set_mark(product.node, site=product.node.name, module=module, gemm="output")
            against = self._reason_against_fp8(product)
            self.rows.append(_row(product, module, against))
            _replace(graph, product, self.target, in_fp8=product.activations == "fp8" and against is None)
        for node in graph.nodes:
            if node.target in DEQUANTIZES and all(is_backward(user) for user in node.users):
                node.meta.update(NEVER_SAVED)
        return PassReport(len(found), "products with packed weights")

    def _reason_against_fp8(self, product: PackedProduct) -> str | None:
        return reason_against_fp8(product.shape, self.target) if product.activations == "fp8" else None


def _row(product: PackedProduct, module: str, against: str | None) -> Row:
    node = product.node
    shape = tuple(size if isinstance(size, int) else str(size) for size in product.shape)
    own = str(value(product.x).dtype).removeprefix("torch.")
    inputs = "e4m3" if product.activations == "fp8" else product.activations or own
    reason = f"packed weight: {product.format}, inputs {inputs}"
    if product.activations == "fp8":
        reason += ", static scale" if product.input_scale is not None else ", dynamic scale a row"
        reason += f"; multiplied in {own}: {against}" if against else ""
    return Row(
        module,
        "output",
        shape,
        REWRITTEN,
        reason,
        op=op_name(node),
        weight=f"{module}.codes".strip("."),
        formats=(inputs, "e2m1" if product.format == "nvfp4" else "e4m3"),
        node=node.name,
        code=code_line(node),
    )


def _packed_product(node: fx.Node) -> PackedProduct | None:
    if node.target is aten.mm.default:
        (x, weight), bias = node.args, None
    elif node.target is aten.addmm.default and node.kwargs in ({}, {"beta": 1, "alpha": 1}):
        bias, x, weight = node.args
        if value(bias).dim() != 1:  # type: ignore[arg-type]
            return None
    else:
        return None
    dequantize = _dequantize_behind(weight)  # type: ignore[arg-type]
    if is_backward(node) or dequantize is None or value(x).dtype not in _DTYPES:  # type: ignore[arg-type]
        return None
    return PackedProduct(node, *_before_rounding(x, dequantize, bias))  # type: ignore[arg-type]


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _dequantize_behind(weight: fx.Node) -> fx.Node | None:
    """The dequantize that a [K, N] operand is the transpose of, casts aside."""
    flipped = False
    while weight.op == "call_function":
        if weight.target in DEQUANTIZES:
            return weight if flipped else None
        if weight.target is aten.t.default or (weight.target is aten.permute.default and weight.args[1] == [1, 0]):
            flipped = not flipped
        elif weight.target not in CASTS:
            return None
        weight = weight.args[0]  # type: ignore[assignment]
    return None


def _before_rounding(
    x: fx.Node, dequantize: fx.Node, bias: fx.Node | None
) -> tuple[fx.Node, fx.Node, fx.Node | None, str | None, fx.Node | None]:
    """What was rounded, and how; ``x`` itself where nothing was. A cast behind the rounding is done before it."""
    source = x.args[0] if x.target in CASTS else x
    if isinstance(source, fx.Node) and source.target is nvfp4.round_activations_op:
        return source.args[0], dequantize, bias, source.args[1], None  # type: ignore[return-value]
    if isinstance(source, fx.Node) and source.target is fp8_inputs.round_inputs_op:
        return source.args[0], dequantize, bias, "fp8", source.args[1]  # type: ignore[return-value]
    return x, dequantize, bias, None, None


def _replace(graph: fx.Graph, product: PackedProduct, target: str, *, in_fp8: bool) -> None:
    node, packed, x, bias = product.node, product.dequantize, product.x, product.bias
    with graph.inserting_before(node):
        if value(x).dtype != value(node).dtype:
            x = emit(graph, prims.convert_element_type.default, x, value(node).dtype, like=node)
        if product.format == "nvfp4":
            codes, block_scales, global_scale, _, _, layout = packed.args
            arguments = (codes, block_scales, global_scale, bias, product.activations, layout)
            result = emit(graph, nvfp4.mm_op, x, *arguments, like=node)
        else:
            codes, scales, _ = packed.args
            if in_fp8:
                result = multiply_fp8(graph, x, product.input_scale, codes, scales, bias, target, like=node)
            else:
                if product.activations == "fp8":
                    x = emit(graph, fp8_inputs.round_inputs_op, x, product.input_scale, like=node)
                result = emit(graph, fp8_weight.mm_op, x, codes, scales, bias, like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
