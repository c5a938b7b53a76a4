"""Replace a product of ragged groups with one of MXFP8 operands.

    Before:  y: bf16[T, N] = _grouped_mm(x, permute(w, [0, 2, 1]), offsets)
             dw: bf16[E, N, K] = _grouped_mm(permute(dy), x, offsets)
    After:   ends, source, place = layout(offsets)                               kernels/padded_groups.py
             qx, sx = quantize_mx(x[source], [1, 32]);  qw, sw = quantize_mx(view(w, [E * N, K]), [32, 32])
             y = mx_grouped_mm(qx, permute(view(qw, [E, N, K])), ends, sx, permute(sw), bf16)[place]
             qg, sg = quantize_mx(dy[source], [32, 1]);  q', s' = quantize_mx(x[source], [32, 1])
             dw = mx_grouped_mm(permute(qg), q', ends, permute(sg), s', bf16)

A block of 32 tokens must not reach into the next group, nor may 128 rows of scales, which a GPU reads at once: groups
are filled up with zeros. On a CPU, that is so for the gradient of the weights alone.
"""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.mx_grouped_mm import MULTIPLE, mx_grouped_mm_op
from fp8_compile.kernels.mxfp8 import SIZE, quantize_mx_op

from ..graph.emit import NEVER_SAVED, inline, value
from ..graph.groups import GroupedProduct, Side
from ..graph.matmul import GroupedMatmul
from ..graph.padded_groups import PaddedGroups
from ..graph.producers import made_pointwise
from ..graph.roles import Role
from ..graph.rules import Rules
from ..graph.views import untransposed
from .allow_recompute import recompute_copy
from .decide import Rewrite
from .dequantize_forward import ForwardOperands
from .rewrite_block_scaled import Site

aten = torch.ops.aten


class GroupedMxEditor:
    """The edit of one product."""

    def __init__(
        self,
        graph: fx.Graph,
        site: GroupedMatmul,
        plan: Rewrite,
        rules: Rules,
        operands: ForwardOperands,
        groups: PaddedGroups,
    ) -> None:
        self.place = Site(graph, site, plan, rules, None, operands)
        self.graph, self.site, self.groups = graph, site, groups
        self.multiple = SIZE if rules.target == "cpu" else MULTIPLE

    def product(self, product: GroupedProduct) -> fx.Node:
        """The result, as ``product`` has it."""
        return (self._over_tokens if product.contracts else self._by_rows)(product)

    def _by_rows(self, product: GroupedProduct) -> fx.Node:
        tokens, offsets = self._tokens_first(product.left), product.offsets
        on_cpu, ends = self.multiple == SIZE, offsets
        filled = tokens
        if not on_cpu:
            ends = self.groups.ends(offsets, tokens, self.multiple)
            filled = self.groups.fill(tokens, offsets, self.multiple, like=self.site.node)
        q, scale = self._quantize(filled, self.place.plan.left.block, is_left=True)
        q_right, scale_right = self._experts(product.right)
        y = self.place.gemm(mx_grouped_mm_op, q, q_right, ends, scale, scale_right, value(self.site.node).dtype)
        return y if on_cpu else self.groups.cut(y, tokens, offsets, self.multiple, like=self.site.node)

    def _experts(self, side: Side) -> tuple[fx.Node, fx.Node]:
        """The stack of matrices as one, quantized as it is stored."""
        base, transposed = untransposed(side.node)
        experts, height, width = value(base).shape
        block = self.place.plan.right.block
        flat = inline(self.graph, _flat, base, like=self.site.node)
        q, scale = self._quantize(flat, block, is_left=False)
        q = self.place.emit(aten.view.default, q, [experts, height, width])
        blocks = [experts, height // block[0], (width + block[1] - 1) // block[1]]
        scale = self.place.emit(aten.view.default, scale, blocks)
        if transposed != side.flipped:
            q, scale = (self.place.emit(aten.permute.default, one, [0, 2, 1]) for one in (q, scale))
        return q, scale

    def _over_tokens(self, product: GroupedProduct) -> fx.Node:
        sides = []
        for side, is_left in ((product.left, True), (product.right, False)):
            tokens = self._tokens_first(side, across=is_left)
            forward, role = self.site.forward, self.place.role(is_left)
            again = forward is not None and "recompute" not in forward.node.meta
            again = again and role is Role.INPUT and made_pointwise(tokens)
            if again:  # cheap to make from what is saved anyway
                tokens = recompute_copy(self.graph, tokens, like=self.site.node)
            filled = self.groups.fill(tokens, product.offsets, self.multiple, like=self.site.node)
            block = (self.place.plan.left if is_left else self.place.plan.right).block[::-1]
            sides.append(self._quantize(filled, block, is_left=is_left, again=again))
            ends = self.groups.ends(product.offsets, tokens, self.multiple)
        (q_left, scale_left), (q_right, scale_right) = sides
        q_left, scale_left = (self.place.emit(aten.permute.default, one, [1, 0]) for one in (q_left, scale_left))
        operands = (q_left, q_right, ends, scale_left, scale_right, value(self.site.node).dtype)
        return self.place.gemm(mx_grouped_mm_op, *operands)

    def _tokens_first(self, side: Side, *, across: bool = False) -> fx.Node:
        """The matrix with one row per token; ``across``: the side has them as columns."""
        base, transposed = untransposed(side.node)
        if (transposed != side.flipped) != across:
            base = self.place.emit(aten.permute.default, base, [1, 0])
        return base

    def _quantize(
        self, x: fx.Node, block: tuple[int, int], *, is_left: bool, again: bool = False
    ) -> tuple[fx.Node, fx.Node]:
        tags = NEVER_SAVED if again else None
        return self.place.both(quantize_mx_op, x, list(block), mark=self.place.mark(is_left), tags=tags)


def _flat(stack: torch.Tensor) -> torch.Tensor:
    """A stack of matrices as one: [E, R, C] -> [E * R, C]."""
    return stack.reshape(-1, stack.shape[2])
