"""Replace a product of ragged groups with an FP8 one."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import fx

from fp8_compile.kernels.cpu.scaled_grouped_mm import scaled_grouped_mm_op
from fp8_compile.kernels.dequantize_operand import dequantize_fp8_operand_op
from fp8_compile.kernels.quantize import WHOLE, quantize_op

from ..graph.emit import emit, getitem, inline, policy_of, value
from ..graph.groups import GroupedProduct, Side, grouped_product
from ..graph.marks import Kind, Mark
from ..graph.matmul import GroupedMatmul
from ..graph.padded_groups import PaddedGroups
from ..graph.relayouts import emit_relayout
from ..graph.rules import Rules
from ..graph.slot import tensor_use
from ..graph.views import untransposed
from .decide import OperandPlan, Rewrite
from .dequantize_forward import ForwardOperands, QuantizedOperand
from .rewrite_grouped_mx import GroupedMxEditor

aten, prims = torch.ops.aten, torch.ops.prims

torch_grouped_mm_op = aten._scaled_grouped_mm.default


class GroupedEditor:
    """The edit of one product.

    Before:  y: bf16[T, N] = _grouped_mm(x, permute(w, [0, 2, 1]), offsets)
    After:   qx, sx = quantize(x);  qw, sw = quantize(view(w, [E * N, K]))
    CPU:     y: bf16[T, N] = fp8_compile.scaled_grouped_mm(qx, permute(view(qw, [E, N, K]), [0, 2, 1]), offsets, sx, sw)
    GPU:     y: bf16[T, N] = _scaled_grouped_mm(qx, permute(view(qw, [E, N, K]), [0, 2, 1]), sx [T], sw [E, N], offsets)

    torch's operation for GPUs takes one scale per row and per column, wants K contiguous, and writes bf16.

    The experts of a layer are one tensor, with one scale, or one per row of each expert. Where the contraction goes
    over tokens (grad_weight), a row has one scale for all groups: where they begin and end is not known when scales are
    made. A GPU wants sizes of groups that are multiples of 16 then: codes go to where each group is filled up with
    zeros, and are transposed there.

    MXFP8 is in ``rewrite_grouped_mx.py``.
    """

    def __init__(
        self,
        graph: fx.Graph,
        site: GroupedMatmul,
        plan: Rewrite,
        rules: Rules,
        operands: ForwardOperands,
        groups: PaddedGroups,
    ) -> None:
        self.graph, self.site, self.plan, self.rules, self.operands = graph, site, plan, rules, operands
        self.groups = groups

    def replace(self) -> None:
        node = self.site.node
        product = grouped_product(node)  # as it is now: an edit may have replaced operands
        assert product is not None, node.format_node()
        with self.graph.inserting_before(node):
            if self.rules.block_scaled is not None:
                given = (self.graph, self.site, self.plan, self.rules, self.operands, self.groups)
                result = GroupedMxEditor(*given).product(product)
            else:
                result = self._product(product)
            if product.flipped:
                result = self._emit(aten.permute.default, result, [0, 2, 1])
        node.replace_all_uses_with(result)
        self.graph.erase_node(node)

    def _product(self, product: GroupedProduct) -> fx.Node:
        offsets = self._ends(product)
        q_left, scale_left = self._operand(product, product.left, self.plan.left, is_left=True)
        q_right, scale_right = self._operand(product, product.right, self.plan.right, is_left=False)
        multiply = self._by_torch if self.rules.needs_k_contiguous else self._by_ours
        operands = (q_left, q_right, offsets, scale_left, scale_right)
        return multiply(*operands, tags=policy_of(self.site.node), mark=Mark(kind=Kind.GEMM))

    def _fills(self, product: GroupedProduct) -> bool:
        """True if the groups must be filled up."""
        return product.contracts and self.rules.needs_k_contiguous

    def _ends(self, product: GroupedProduct) -> fx.Node:
        if not self._fills(product):
            return product.offsets
        return self.groups.ends(product.offsets, product.right.node, self.rules.alignment)

    def _by_ours(self, *operands: fx.Node, **noted: Any) -> fx.Node:
        return self._emit(scaled_grouped_mm_op, *operands, value(self.site.node).dtype, **noted)

    def _by_torch(
        self,
        left: fx.Node,
        right: fx.Node,
        offsets: fx.Node,
        scale_left: fx.Node,
        scale_right: fx.Node,
        **noted: Any,
    ) -> fx.Node:
        wanted = value(self.site.node).dtype
        if value(right).dim() == 2:  # one scale per row and group
            groups = int(value(offsets).shape[0])
            sides = (scale_left, left), (self._emit(aten.permute.default, scale_right, [1, 0]), self._across(right))
            scales = tuple(self._inline(_group_scales, scale, side, groups) for scale, side in sides)
        else:
            scales = self._inline(_row_scales, scale_left, left), self._inline(_column_scales, scale_right, right)
        if value(offsets).dtype != torch.int32:
            offsets = self._emit(prims.convert_element_type.default, offsets, torch.int32)
        # FP22 accumulation is enough for activations, as in products that are not in groups.
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": self.site.gemm == "output"}
        result = self._emit(torch_grouped_mm_op, left, right, *scales, offsets, **noted, **options)
        return result if wanted == torch.bfloat16 else self._emit(prims.convert_element_type.default, result, wanted)

    def _across(self, right: fx.Node) -> fx.Node:
        return self._emit(aten.permute.default, right, [1, 0])

    def _operand(
        self, product: GroupedProduct, side: Side, plan: OperandPlan, *, is_left: bool
    ) -> tuple[fx.Node, fx.Node]:
        """FP8 values and scales of one side, as ``kernels/scaled_grouped_mm.py`` has them."""
        base, transposed = untransposed(side.node)
        flipped = transposed != side.flipped
        rows_first = flipped != is_left  # the base is stored as [rows, contraction]
        *stack, height, _ = value(base).shape
        block = list(plan.block if rows_first else plan.block[::-1])
        if stack and block == [WHOLE, 1]:
            block[0] = height  # not into the next expert
        role = (self.site.left if is_left else self.site.right).role
        mark = Mark(use=tensor_use(self.site, role), stochastic=role in self.rules.stochastic)
        flat = self._inline(_flat, base) if stack else base
        both = self._emit(quantize_op, flat, plan.format.dtype, block, mark=mark)
        q, scale = getitem(self.graph, both, 0), getitem(self.graph, both, 1)
        sizes = tuple(value(base).shape) if stack else ()
        known = QuantizedOperand(dequantize_fp8_operand_op, (q, scale, block), transposed, sizes)
        self.operands.note(self.site, is_left, None, known)
        if stack:
            q = self._emit(aten.view.default, q, list(value(base).shape))
            if plan.block != (WHOLE, WHOLE):  # [E * rows, 1] or [E, rows]
                scale = self._emit(aten.view.default, scale, [stack[0], 1, -1])
        elif flipped:
            scale = self._emit(aten.permute.default, scale, [1, 0])
        if self._fills(product) and rows_first:  # tokens are columns, and groups are of rows
            q, rows_first, flipped = self._emit(aten.permute.default, q, [1, 0]), False, not flipped
        if self._fills(product):
            q = self.groups.fill(q, product.offsets, self.rules.alignment, like=self.site.node)
        if self.rules.needs_k_contiguous and not rows_first:
            q = emit_relayout(self.graph, q, True, 1, 1, like=self.site.node)
            flipped = not flipped
        if flipped:
            q = self._emit(aten.permute.default, q, [0, 2, 1] if stack else [1, 0])
        return q, scale

    def _emit(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return emit(self.graph, op, *args, like=self.site.node, **kwargs)

    def _inline(self, function: Callable[..., torch.Tensor], *args: Any) -> fx.Node:
        return inline(self.graph, function, *args, like=self.site.node)


def _flat(stack: torch.Tensor) -> torch.Tensor:
    """A stack of matrices as one: [E, R, C] -> [E * R, C]."""
    return stack.reshape(-1, stack.shape[2])


def _row_scales(scale: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """One scale per row: [1, 1] or [T, 1] -> [T]."""
    return scale.expand(left.shape[0], 1).reshape(-1).contiguous()


def _group_scales(scale: torch.Tensor, left: torch.Tensor, groups: int) -> torch.Tensor:
    """One scale per row and group: [1, 1] or [M, 1] -> [groups * M]."""
    return scale.expand(left.shape[0], 1).reshape(-1).repeat(groups)


def _column_scales(scale: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """One scale per column of each expert: [1, 1] or [E, 1, N] -> [E, N]."""
    return scale.expand(right.shape[0], 1, right.shape[2]).reshape(right.shape[0], -1).contiguous()
