"""The two operations that are FP8 gemms on a GPU, seen as one.

    aten._scaled_mm          left @ right * scale_left * scale_right + bias            K contiguous, any scales
    fp8_compile.cublaslt_mm  left @ right * scale_left * scale_right + bias + added    any layout where the GPU can read
                                                                                       it, one scale a tensor
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import torch
from torch import fx

from fp8_compile.kernels.gpu.cublaslt_mm import cublaslt_mm_op

from .emit import GEMM, emit, value

scaled_mm_op = torch.ops.aten._scaled_mm.default


@dataclasses.dataclass(frozen=True)
class Fp8Gemm:
    """What a gemm is asked for."""

    left: fx.Node
    right: fx.Node
    scale_left: fx.Node
    scale_right: fx.Node
    bias: fx.Node | None
    out_dtype: torch.dtype
    fast_accumulation: bool
    added: fx.Node | None = None

    @property
    def one_scale_each(self) -> bool:
        return all(value(scale).numel() == 1 for scale in (self.scale_left, self.scale_right))

    def emit(
        self,
        graph: fx.Graph,
        *,
        like: fx.Node,
        by_cublaslt: bool = False,
        tags: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """As one node. ``by_cublaslt``: because of how the operands lie, or of what is added."""
        operands = (self.left, self.right, self.scale_left, self.scale_right)
        tags = {**(tags or {}), "fp8_kind": GEMM}
        if by_cublaslt:
            options: dict[str, Any] = {"out_dtype": self.out_dtype, "fast_accumulation": self.fast_accumulation}
            return emit(graph, cublaslt_mm_op, *operands, self.added, self.bias, like=like, tags=tags, **options)
        assert self.added is None
        options = {"bias": self.bias, "out_dtype": self.out_dtype, "use_fast_accum": self.fast_accumulation}
        return emit(graph, scaled_mm_op, *operands, like=like, tags=tags, **options)


def fp8_gemm(node: fx.Node) -> Fp8Gemm | None:
    """What a node is as an FP8 gemm; None if it is none of ours (a model may have its own)."""
    if node.op != "call_function" or node.meta.get("fp8_kind") != GEMM:
        return None
    dtype, options = value(node).dtype, node.kwargs
    if node.target is scaled_mm_op:
        return Fp8Gemm(*node.args, options.get("bias"), dtype, options.get("use_fast_accum", False))  # type: ignore[arg-type]
    if node.target is cublaslt_mm_op:
        *operands, added, bias = node.args
        return Fp8Gemm(*operands, bias, dtype, options.get("fast_accumulation", False), added)  # type: ignore[arg-type]
    return None
