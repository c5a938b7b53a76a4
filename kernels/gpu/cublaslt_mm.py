"""The FP8 gemm of NVIDIA's own library, as an operation of a graph: it adds a matrix to its product, and reads operands
in any layout on GPUs that can (compute capability 10.x).

    y = left @ right * scale_left * scale_right + bias + added

left: [M, K], right: [K, N] fp8; scale_left, scale_right: one fp32 each; bias: [N]; added: [M, N] -> y: [M, N] in
``out_dtype``, which is that of ``added``. Only the result is rounded.

A residual, or the sum of the gradients of a tensor that several layers read, costs a pass over memory where it is an
addition of its own: the product is written, read back, and the sum written. cuBLASLt reads ``added`` while it writes.
``torch._scaled_mm`` has no argument for it, and insists on operands with K contiguous while it is traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_compile.kernels.scaled_mm import scaled_mm

from .cublaslt import Gemm
from .cublaslt_op import GemmOp, probe_numbers, with_k_contiguous

PROBE_SIZE = 64


class Operands(NamedTuple):
    """What the operation takes, in the order in which it takes them."""

    left: Tensor
    right: Tensor
    scale_left: Tensor
    scale_right: Tensor
    added: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype
    fast_accumulation: bool = False


class Fp8Gemm(GemmOp[Operands]):
    """The formula above."""

    name, title, takes = "cublaslt_mm", "FP8", Operands
    arguments = (
        "Tensor left, Tensor right, Tensor scale_left, Tensor scale_right, Tensor? added, Tensor? bias, "
        "ScalarType out_dtype, bool fast_accumulation=False"
    )

    def reference(self, given: Operands) -> Tensor:
        scales = (given.scale_left.view(1, 1), given.scale_right.view(1, 1))
        product = scaled_mm(given.left, given.right, *scales, given.bias, torch.float32)
        return (product if given.added is None else product + given.added).to(given.out_dtype)

    def by_torch(self, given: Operands, y: Tensor) -> None:
        """Copies with K contiguous where they are not, and a result that is rounded before the addition."""
        scales = self.scales_for_torch(given)
        options: dict[str, Any] = {"out_dtype": y.dtype, "use_fast_accum": given.fast_accumulation, "out": y}
        torch._scaled_mm(*with_k_contiguous(given.left, given.right), *scales, bias=given.bias, **options)
        if given.added is not None:
            y.add_(given.added)

    def scales_for_torch(self, given: Operands) -> tuple[Tensor, Tensor]:
        """As ``torch._scaled_mm`` takes them."""
        return given.scale_left.view(1, 1), given.scale_right.view(1, 1)

    def gemm(self, given: Operands, y: Tensor) -> Gemm:
        left, right, scale_left, scale_right, added, bias, _, fast_accumulation = given
        return Gemm(left, right, scale_left, scale_right, bias, added, y, fast_accumulation)

    def probes(self, device: torch.device, any_layout: bool) -> Iterator[Operands]:
        *ones, added = probe_numbers(PROBE_SIZE, device)
        left, right = (one.to(torch.float8_e4m3fn) for one in ones)
        scales = (torch.tensor(0.5, device=device), torch.tensor(2.0, device=device))
        pairs = [(left, right.t()), *([(left, right), (left.t(), right), (left.t(), right.t())] if any_layout else [])]
        for pair in pairs:
            yield Operands(*pair, *scales, added, None, torch.bfloat16)

    def size(self, left: Any, right: Any) -> tuple[Any, Any]:
        return left[0], right[1]


GEMM = Fp8Gemm()
cublaslt_mm_op = GEMM.op
