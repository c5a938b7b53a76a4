"""Products with packed weights, of linear layers and of experts, run from the packed form."""

from __future__ import annotations

import functools
from typing import Callable

from torch import fx

from fp8_compile.torch_internals.graphs import remove_dead_nodes

from ..graph.emit import NEVER_SAVED
from ..graph.marks import set_mark
from ..graph.roles import is_backward
from ..graph.row import Row
from ..graph_pass import GraphPass, PassReport
from .expert_products import find_experts_product, look_up_packed, round_inputs_of_experts
from .layer_products import find_layer_gradient, find_layer_product
from .packed_formats import OF_EXPERTS, OF_LAYERS
from .packed_product import PackedProduct, StackNames

__all__ = ["MultiplyPacked", "StackNames"]


class MultiplyPacked(GraphPass):
    """Replace the product with a dequantized weight by one op that reads the packed one.

    Before:  w: bf16[N, K] = nvfp4_dequantize(codes, block_scales, global_scale, K, bf16, layout)
             y: bf16[M, N] = addmm(bias, nvfp4_round_activations(x), permute(w))
    After:   y: bf16[M, N] = nvfp4_mm(x, codes, block_scales, global_scale, bias, activations, layout)

    Before:  w: bf16[E, N, K] = nvfp4_dequantize_experts(codes, block_scales, global_scale, K, bf16, layout)
             y: bf16[M, N] = _grouped_mm(x, permute(w, [0, 2, 1]), ends)
             z: bf16[M, N, 1] = bmm(index(w, [which]), unsqueeze(x, -1))
    After:   y: bf16[M, N] = nvfp4_experts_mm(x, codes, block_scales, global_scale, ends, "grouped", layout)
             z: bf16[M, N, 1] = unsqueeze(nvfp4_experts_mm(x, ..., which, "gathered", layout), -1)

    Before:  dx: bf16[M, K] = mm(dy, w)                                 in backward
    After:   dx: bf16[M, K] = nvfp4_mm_grad(dy, codes, block_scales, global_scale, K, layout)

    The same for FP8 (``packed_formats.py``); where inputs of a layer go through ``round_inputs`` it is an FP8 gemm
    (``multiply_fp8.py``). Where experts are looked up and something else becomes of them, and for GPUs, which have no
    such product here, those alone are dequantized: ``index(w, [which])`` is ``nvfp4_dequantize_experts(..., which)``.
    What backward needs of a dequantized weight beside products it dequantizes again. Every replaced product gets a
    :class:`Row`.
    """

    def __init__(self, names: StackNames, target: str = "cpu") -> None:
        self.names, self.target = names, target
        self.rows: list[Row] = []

    @staticmethod
    def applies(graph: fx.Graph) -> bool:
        """True if the graph has packed weights."""
        return any(_dequantizes(node) for node in graph.nodes)

    def run(self, graph: fx.Graph) -> PassReport:
        found = self._find(graph)
        for product in found:
            module = self.names.module_of(product.node)
            set_mark(product.node, site=product.node.name, module=module, gemm=product.gemm)
            self.rows.append(product.row(self.names, module, self.target))
            product.replace(graph, self.target)
        remove_dead_nodes(graph)  # lookups whose product was replaced
        rounded = round_inputs_of_experts(graph)
        lookups = look_up_packed(graph)
        for node in graph.nodes:
            if _dequantizes(node) and node.users and all(is_backward(user) for user in node.users):
                node.meta.update(NEVER_SAVED)
        what = "products with packed weights" + (" and lookups in them" if lookups else "")
        return PassReport(len(found) + lookups + rounded, what)

    def _find(self, graph: fx.Graph) -> list[PackedProduct]:
        in_layers = functools.partial(find_layer_product, target=self.target)
        kinds: list[Callable[[fx.Node], PackedProduct | None]] = [in_layers, find_layer_gradient]
        if self.target == "cpu":  # GPUs have no product with experts here
            kinds.append(_packed_experts_product)
        return [product for find in kinds for node in graph.nodes if (product := find(node)) is not None]


def _packed_experts_product(node: fx.Node) -> PackedProduct | None:
    product = find_experts_product(node)
    return product if product is not None and product.format.multiplies_experts else None


def _dequantizes(node: fx.Node) -> bool:
    return node.target in OF_LAYERS or node.target in OF_EXPERTS
