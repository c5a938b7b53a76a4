"""The NVFP4 gemm of NVIDIA's own library, as an operation of a graph: ``cublaslt_mx_mm.py`` for 4-bit operands.

    y = alpha * left @ right^T + bias + added        of codes times block scales, see kernels/nvfp4_swizzled.py

left: [M, K/2], right: [N, K/2] uint8, contiguous; scale_left, scale_right: flat e4m3, swizzled; alpha: one fp32, the
product of both tensors' scales; bias: [N]; added: [M, N] -> y: [M, N] in ``out_dtype``, which is that of ``added``.
Only the result is rounded. K, M and N are multiples of 32.

The scales of the tensors are known to the GPU alone, and cuBLASLt reads their product from its memory.
``torch._scaled_mm`` has no argument for it: where cuBLASLt can't be called directly, the result is multiplied in a pass
of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_compile.kernels.nvfp4_swizzled import quantize_nvfp4_swizzled, swizzled_nvfp4_mm
from fp8_compile.kernels.operands import FLOATS, FP32, check, check_value

from .cublaslt import Gemm
from .cublaslt_op import GemmOp, probe_numbers

PROBE_SIZE = 128


class Operands(NamedTuple):
    """What the operation takes, in the order in which it takes them."""

    left: Tensor
    right: Tensor
    scale_left: Tensor
    scale_right: Tensor
    alpha: Tensor
    added: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype


class Nvfp4Gemm(GemmOp[Operands]):
    """The formula above."""

    name, title, takes = "cublaslt_nvfp4_mm", "NVFP4", Operands
    arguments = (
        "Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor alpha, Tensor? added, Tensor? bias, "
        "ScalarType out_dtype"
    )

    def reference(self, given: Operands) -> Tensor:
        return swizzled_nvfp4_mm(*given)

    def by_torch(self, given: Operands, y: Tensor) -> None:
        """A result that is multiplied and added to in passes of their own."""
        codes = (given.left.view(torch.float4_e2m1fn_x2), given.right.view(torch.float4_e2m1fn_x2).t())
        product = torch._scaled_mm(*codes, given.scale_left, given.scale_right, out_dtype=torch.float32)
        product.mul_(given.alpha.reshape(()))
        for one in (given.bias, given.added):
            if one is not None:
                product.add_(one)
        y.copy_(product)

    def gemm(self, given: Operands, y: Tensor) -> Gemm:
        left, right, scale_left, scale_right, alpha, added, bias, _ = given
        return Gemm(left, right.t(), scale_left, scale_right, bias, added, y, alpha=alpha)

    def probes(self, device: torch.device, any_layout: bool) -> Iterator[Operands]:
        """With and without an addition. Scales differ from block to block, so that a wrong order of them is noticed."""
        *ones, added = probe_numbers(PROBE_SIZE, device)
        place = torch.arange(PROBE_SIZE, device=device)
        sides = [6 * one * ((place[:, None] // 32 + place // 16) % 3 + 1).exp2() for one in ones]
        enc = torch.ones(1, 1, device=device)
        options = (1.0, (1, 16), False, False, None, 0, False, PROBE_SIZE)
        (left, scale_left), (right, scale_right) = (quantize_nvfp4_swizzled(side, enc, *options) for side in sides)
        for also in (added, None):
            yield Operands(left, right, scale_left, scale_right, enc / 1024, also, None, torch.bfloat16)

    def size(self, left: Any, right: Any) -> tuple[Any, Any]:
        return left[0], right[0]

    def inner(self, left: Any) -> Any:
        return 2 * left[1]

    def require(self, given: Operands) -> None:
        (m, half), n = given.left.shape, given.right.shape[0]
        for side, codes, rows in (("left", given.left, m), ("right", given.right, n)):
            check(self.name, side, codes, (torch.uint8,), (rows, half), contiguous=True)
        check(self.name, "alpha", given.alpha, FP32)
        check_value(self.name, "numbers in alpha", given.alpha.numel(), (1,))
        if given.bias is not None:
            check(self.name, "bias", given.bias, FLOATS, (n,))
        check_value(self.name, "out_dtype", given.out_dtype, FLOATS)


GEMM = Nvfp4Gemm()
cublaslt_nvfp4_mm_op = GEMM.op
