"""The operations that are FP8 gemms on a GPU, seen as one.

aten._scaled_mm          left @ right * scale_left * scale_right + bias            K contiguous, any scales
fp8_compile.cublaslt_mm  left @ right * scale_left * scale_right + bias + added    any layout where the GPU can read
                                                                                   it, one scale per tensor
fp8_compile.cublaslt_mx_mm  the same with a scale for each 32 values along K
fp8_compile.cublaslt_nvfp4_mm  alpha * left @ right^T + bias + added, with a scale for each 16 values of 4 bits
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import torch
from torch import fx

from fp8_compile.kernels.gpu.cublaslt_mm import cublaslt_mm_op
from fp8_compile.kernels.gpu.cublaslt_mx_mm import cublaslt_mx_mm_op
from fp8_compile.kernels.gpu.cublaslt_nvfp4_mm import cublaslt_nvfp4_mm_op

from .arguments import arguments
from .emit import emit, value
from .marks import Kind, Mark, marked

scaled_mm_op = torch.ops.aten._scaled_mm.default
GEMMS = (scaled_mm_op, cublaslt_mm_op, cublaslt_mx_mm_op, cublaslt_nvfp4_mm_op)


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
    is_mx: bool = False
    alpha: fx.Node | None = None  # of NVFP4

    @property
    def can_add(self) -> bool:
        """True if cuBLASLt has a gemm of these scales that adds a matrix."""
        blocks = self.is_mx or self.alpha is not None
        return blocks or all(value(scale).numel() == 1 for scale in (self.scale_left, self.scale_right))

    def emit(
        self,
        graph: fx.Graph,
        *,
        like: fx.Node,
        by_cublaslt: bool = False,
        tags: Mapping[str, Any] | None = None,
    ) -> fx.Node:
        """Add the gemm as one node. ``by_cublaslt``: the operands' layout asks for it, or what is added does."""
        operands: tuple[fx.Node | None, ...] = (self.left, self.right, self.scale_left, self.scale_right)
        mark = Mark(kind=Kind.GEMM)
        if self.alpha is not None:
            operands = (*operands, self.alpha, self.added, self.bias)
            return emit(graph, cublaslt_nvfp4_mm_op, *operands, self.out_dtype, like=like, tags=tags, mark=mark)
        if self.is_mx:
            operands = (*operands, self.added, self.bias)
            return emit(graph, cublaslt_mx_mm_op, *operands, self.out_dtype, like=like, tags=tags, mark=mark)
        if by_cublaslt:
            options: dict[str, Any] = {"out_dtype": self.out_dtype, "fast_accumulation": self.fast_accumulation}
            operands = (*operands, self.added, self.bias)
            return emit(graph, cublaslt_mm_op, *operands, like=like, tags=tags, mark=mark, **options)
        assert self.added is None
        options = {"bias": self.bias, "out_dtype": self.out_dtype, "use_fast_accum": self.fast_accumulation}
        return emit(graph, scaled_mm_op, *operands, like=like, tags=tags, mark=mark, **options)


def fp8_gemm(node: fx.Node) -> Fp8Gemm | None:
    """What a node asks for as an FP8 gemm; None if it is not one of ours (a model may have its own)."""
    if not marked(node, Kind.GEMM) or node.target not in GEMMS:
        return None
    if node.target is cublaslt_nvfp4_mm_op:
        left, right, scale_left, scale_right, alpha, added, bias, dtype = arguments(node)
        return Fp8Gemm(left, right, scale_left, scale_right, bias, dtype, False, added, alpha=alpha)
    if node.target is cublaslt_mx_mm_op:
        left, right, scale_left, scale_right, added, bias, dtype = arguments(node)
        return Fp8Gemm(left, right, scale_left, scale_right, bias, dtype, False, added, is_mx=True)
    left, right, scale_left, scale_right, *added_and_bias = arguments(node)
    options: dict[str, Any] = dict(node.kwargs)
    added, bias = added_and_bias or (None, options.get("bias"))
    fast = options.get("use_fast_accum" if node.target is scaled_mm_op else "fast_accumulation", False)
    return Fp8Gemm(left, right, scale_left, scale_right, bias, value(node).dtype, fast, added)
