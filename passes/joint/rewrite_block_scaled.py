"""Replace one matmul by a product of MXFP8 or NVFP4 operands.

    Before:  y: bf16[M, N] = mm(x, permute(w))
    MXFP8:   qx, sx = quantize_mx(x, [1, 32]);  qw, sw = quantize_mx(w, [32, 32])
             y = mx_mm(qx, permute(qw), sx, permute(sw), None, bf16)
    NVFP4:   enc, dequant = global_scale(x)                                  and the same for w
             cx, sx = quantize_nvfp4(x, enc, [1, 16], ...);  cw, sw = quantize_nvfp4(w, enc', [16, 16], ...)
             y = nvfp4_train_mm(cx, cw, sx, sw, dequant, dequant', None, bf16)

Each operand has its blocks along the contraction, so the input and the gradient of a layer are quantized along both
directions. The tiles of a weight are square, and have the same values in both. NVFP4 rotates both operands of a
weight's gradient, 16 tokens at a time, and takes 4 times the scale of the tensor for it, which no rotation exceeds.

An input that is cheap to compute from what is saved anyway, such as the output of an activation function, is quantized
for the weight's gradient in backward. Of others forward does that and saves the codes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Mapping

import torch
from torch import fx

from fp8_compile.kernels.dequantize_operand import dequantize_mx_operand_op, dequantize_nvfp4_operand_op
from fp8_compile.kernels.mxfp8 import mx_mm_op, quantize_mx_op
from fp8_compile.kernels.nvfp4_training import (
    MOST_GROWTH,
    global_scale_op,
    nvfp4_train_mm_op,
    quantize_nvfp4_op,
)

from ..graph.emit import NEVER_SAVED, emit, getitem, inline, policy_of, value
from ..graph.marks import Kind, Mark
from ..graph.matmul import Matmul
from ..graph.producers import made_pointwise
from ..graph.roles import Role
from ..graph.rules import Rules
from ..graph.slot import tensor_use
from ..graph.views import untransposed
from .allow_recompute import recompute_copy
from .decide import OperandPlan, Rewrite
from .dequantize_forward import ForwardOperands, QuantizedOperand

aten = torch.ops.aten
FOUR_OF_SIX = 4.0 / 7.0  # scales are below 256 then, so that 1.5 times of one is below 448
SEEDS = 2**62


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a product goes. ``part``: which product of a stack it is."""

    graph: fx.Graph
    matmul: Matmul
    plan: Rewrite
    rules: Rules
    part: int | None
    operands: ForwardOperands

    def emit(self, op: Callable[..., Any], *args: Any, mark: Mark | None = None) -> fx.Node:
        return emit(self.graph, op, *args, like=self.matmul.node, mark=mark)

    def both(
        self, op: Callable[..., Any], *args: Any, mark: Mark | None = None, tags: Mapping[str, Any] | None = None
    ) -> tuple[fx.Node, fx.Node]:
        result = emit(self.graph, op, *args, like=self.matmul.node, mark=mark, tags=tags)
        parts = getitem(self.graph, result, 0), getitem(self.graph, result, 1)
        for part in parts:
            part.meta.update(tags or {})
        return parts

    def quantize(
        self, op: Callable[..., Any], base: fx.Node, *args: Any, is_left: bool, mark: Mark | None = None
    ) -> tuple[fx.Node, fx.Node]:
        """Codes and scales; made in backward where the partitioner would save codes that are cheap to make."""
        forward, tags = self.matmul.forward, None
        from_forward = forward is not None and "recompute" not in forward.node.meta
        if from_forward and self.role(is_left) is Role.INPUT and made_pointwise(base):
            base, tags = recompute_copy(self.graph, base, like=self.matmul.node), NEVER_SAVED
        return self.both(op, base, *args, mark=mark, tags=tags)

    def gemm(self, op: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.matmul.node
        return emit(self.graph, op, *args, like=node, tags=policy_of(node), mark=Mark(kind=Kind.GEMM))

    def note(self, is_left: bool, op: Callable[..., Any], *args: Any, flipped: bool) -> None:
        """Note how an operand was quantized, for backward products that read it in high precision."""
        self.operands.note(self.matmul, is_left, self.part, QuantizedOperand(op, args, flipped))

    def role(self, is_left: bool) -> Role:
        return (self.matmul.left if is_left else self.matmul.right).role

    def mark(self, is_left: bool) -> Mark:
        return Mark(use=tensor_use(self.matmul, self.role(is_left), self.part))


def mx_product(site: Site, left: fx.Node, right: fx.Node, bias: fx.Node | None, dtype: torch.dtype) -> fx.Node:
    """``[M, K] @ [K, N]`` in MXFP8."""
    q_left, scale_left = _mx_operand(site, left, site.plan.left, is_left=True)
    q_right, scale_right = _mx_operand(site, right, site.plan.right, is_left=False)
    return site.gemm(mx_mm_op, q_left, q_right, scale_left, scale_right, bias, dtype)


def _mx_operand(site: Site, node: fx.Node, plan: OperandPlan, *, is_left: bool) -> tuple[fx.Node, fx.Node]:
    base, flipped = untransposed(node)
    rows_first = flipped != is_left  # the base is stored as [rows, contraction]
    block = plan.block if rows_first else plan.block[::-1]
    q, scale = site.quantize(quantize_mx_op, base, list(block), is_left=is_left, mark=site.mark(is_left))
    site.note(is_left, dequantize_mx_operand_op, q, scale, list(block), flipped=flipped)
    if flipped:
        q, scale = (site.emit(aten.permute.default, one, [1, 0]) for one in (q, scale))
    return q, scale


def nvfp4_product(site: Site, left: fx.Node, right: fx.Node, bias: fx.Node | None, dtype: torch.dtype) -> fx.Node:
    """``[M, K] @ [K, N]`` in NVFP4."""
    codes_left, scales_left, dequant_left = _nvfp4_operand(site, left, site.plan.left, is_left=True)
    codes_right, scales_right, dequant_right = _nvfp4_operand(site, right, site.plan.right, is_left=False)
    operands = (codes_left, codes_right, scales_left, scales_right, dequant_left, dequant_right)
    return site.gemm(nvfp4_train_mm_op, *operands, bias, dtype)


def _nvfp4_operand(
    site: Site, node: fx.Node, plan: OperandPlan, *, is_left: bool
) -> tuple[fx.Node, fx.Node, fx.Node]:
    base, flipped = untransposed(node)
    transpose = flipped == is_left
    role, gemm = site.role(is_left), site.matmul.gemm
    enc, dequant = site.both(global_scale_op, base, mark=site.mark(is_left))
    rotated = gemm == "grad_weight"
    # Forward and the gradient of the input read the same weight.
    four_over_six = site.rules.four_over_six and (gemm == "output" or role is Role.WEIGHT)
    if rotated:
        enc, dequant = inline(site.graph, _rescaled, enc, dequant, 1.0 / MOST_GROWTH, like=site.matmul.node)
    if four_over_six:
        enc, dequant = inline(site.graph, _rescaled, enc, dequant, FOUR_OF_SIX, like=site.matmul.node)
    seed = inline(site.graph, _seed, base, like=site.matmul.node) if role in site.rules.stochastic else None
    options = (list(plan.block), transpose, rotated, seed, int(rotated), four_over_six)
    codes, scales = site.quantize(quantize_nvfp4_op, base, enc, *options, is_left=is_left, mark=site.mark(is_left))
    contraction = value(node).shape[1 if is_left else 0]
    undo = (codes, scales, dequant, list(plan.block), contraction)
    site.note(is_left, dequantize_nvfp4_operand_op, *undo, flipped=not is_left)
    return codes, scales, dequant


def _rescaled(enc: torch.Tensor, dequant: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    enc = enc * factor
    return enc, enc.reciprocal()


def _seed(x: torch.Tensor) -> torch.Tensor:
    """Follows ``torch.manual_seed``."""
    return torch.randint(0, SEEDS, (1,), device=x.device)


PRODUCTS = {"mxfp8": mx_product, "nvfp4": nvfp4_product}
