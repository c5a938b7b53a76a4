"""The MXFP8 gemm of NVIDIA's own library, as an operation of a graph: ``cublaslt_mm.py`` with scales per 32 values.

    y = left @ right + bias + added        of dequantized operands, see kernels/mx_swizzled.py

left: [M, K], right: [K, N] e4m3; scale_left, scale_right: flat uint8, swizzled; bias: [N]; added: [M, N] -> y: [M, N]
in ``out_dtype``, which is that of ``added``. Only the result is rounded. Either dimension of an operand may be
contiguous on compute capability 10.x, K elsewhere. K is a multiple of 32, M and N of 16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fp8_compile.kernels.mx_swizzled import quantize_mx_swizzled, swizzled_mx_mm
from fp8_compile.kernels.operands import FLOATS, check, check_value

from .cublaslt_mm import Fp8Gemm, Operands
from .cublaslt_op import probe_numbers

PROBE_SIZE = 128


class MxGemm(Fp8Gemm):
    """The formula above."""

    name, title = "cublaslt_mx_mm", "MXFP8"

    def reference(self, given: Operands) -> Tensor:
        return swizzled_mx_mm(*given[:-1])

    def scales_for_torch(self, given: Operands) -> tuple[Tensor, Tensor]:
        return given.scale_left.view(torch.float8_e8m0fnu), given.scale_right.view(torch.float8_e8m0fnu)

    def probes(self, device: torch.device, any_layout: bool) -> Iterator[Operands]:
        """Scales differ from block to block, so that a wrong order of them is noticed."""
        *ones, added = probe_numbers(PROBE_SIZE, device)
        place = torch.arange(PROBE_SIZE, device=device)
        left, right = (one * ((place[:, None] // 32 + place // 32) % 3 + 1).exp2() for one in ones)
        flips = [(False, True), *([(False, False), (True, False), (True, True)] if any_layout else [])]
        for flip_left, flip_right in flips:
            q_left, *scales_left = quantize_mx_swizzled(left, (32, 1) if flip_left else (1, 32))
            q_right, *scales_right = quantize_mx_swizzled(right, (1, 32) if flip_right else (32, 1))
            pair = (q_left.t() if flip_left else q_left, q_right.t() if flip_right else q_right)
            scales = (scales_left[flip_left], scales_right[not flip_right])
            yield Operands(*pair, *scales, added, None, torch.bfloat16)

    def require(self, given: Operands) -> None:
        e4m3 = (torch.float8_e4m3fn,)
        check(self.name, "left", given.left, e4m3, (given.left.shape[0], given.right.shape[0]))
        check(self.name, "right", given.right, e4m3, given.right.shape)
        if given.bias is not None:
            check(self.name, "bias", given.bias, FLOATS, (given.right.shape[1],))
        check_value(self.name, "out_dtype", given.out_dtype, FLOATS)


GEMM = MxGemm()
cublaslt_mx_mm_op = GEMM.op
