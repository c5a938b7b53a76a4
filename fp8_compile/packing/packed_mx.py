"""Modules whose weight is MXFP8: a linear layer, and a stack of experts.

Values are exact in bf16 and FP32, so a dequantized product gives what one of packed weights does. Compiled for a CPU, a
layer with rounded inputs runs by the gemm of ``recipe="mxfp8"``; otherwise the weight is dequantized for each product.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_compile.kernels import mx_weight
from fp8_compile.kernels.mx_weight import MXWeight

from .packed_experts import PackedStack
from .packed_linear import PackedLinear
from .uncompiled_product import autocast

NO_KERNEL = (
    "MXFP8 has no product without Python for exact inputs; pack with activations='mxfp8', or the original weights with "
    "format='fp8' or 'nvfp4'"
)


class MXFP8Linear(PackedLinear):
    """codes e4m3 [N, K], scales uint8 [N, ceil(K / 32)], or one per tile of 32 x 32."""

    packed = ("codes", "scales")
    codes: Tensor
    scales: Tensor

    @classmethod
    def convert(
        cls,
        layer: nn.Module,
        weight: MXWeight,
        dtype: torch.dtype,
        activations: str | None,
        input_scale: Tensor | None = None,
    ) -> None:
        assert activations in mx_weight.ACTIVATIONS and input_scale is None
        transposed = cls.is_transposed(layer)
        layer.__class__ = cls
        assert isinstance(layer, MXFP8Linear)
        layer.transposed, layer.activations = transposed, activations
        n, k = weight.shape
        layer._become(k, n, dtype, {"codes": weight.codes, "scales": weight.scales})

    def matrix(self) -> MXWeight:
        return MXWeight(self.codes, self.scales)

    @property
    def static_inputs(self) -> bool | None:
        return None if self.activations is None else False

    @property
    def inputs(self) -> str:
        return "" if self.activations is None else "inputs mxfp8"

    def forward(self, input: Tensor) -> Tensor:
        rows = autocast(input.reshape(-1, self.in_features))
        if self.activations is not None:
            rows = mx_weight.round_inputs_op(rows)
        y = F.linear(rows, self.dequantize(rows.dtype), self.bias_as(rows.dtype))
        return y.view(*input.shape[:-1], self.out_features)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return mx_weight.dequantize_op(self.codes, self.scales, dtype)

    def reason_against_export(self) -> str | None:
        return NO_KERNEL if self.activations is None else None


class MXFP8Stack(PackedStack):
    """codes e4m3 [E, N, K], scales uint8 [E, N, ceil(K / 32)], or per tile."""

    packed = ("codes", "scales")
    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrices: Sequence[MXWeight], dtype: torch.dtype, transposed: bool) -> MXFP8Stack:
        codes, scales = (torch.stack(parts) for parts in zip(*matrices))
        return cls(codes.shape, dtype, transposed, {"codes": codes, "scales": scales})

    def matrix(self, expert: int) -> MXWeight:
        return MXWeight(self.codes[expert], self.scales[expert])

    def dequantize(self, dtype: torch.dtype = torch.float32, which: Tensor | None = None) -> Tensor:
        codes, scales = self.codes, self.scales
        if which is not None:
            codes, scales = codes.view(torch.uint8)[which].view(codes.dtype), scales[which]
        return mx_weight.dequantize_op(codes, scales, dtype)

    def reason_against_export(self) -> str | None:
        return NO_KERNEL
