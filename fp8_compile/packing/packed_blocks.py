"""Modules whose weight is FP8 by blocks of 128 x 128: a linear layer, and a stack of experts.

They hold what checkpoints by blocks hold, bit for bit. Compiled for a CPU, a layer with rounded inputs runs by the gemm
of ``recipe="blockwise"``; otherwise the weight is dequantized for each product, also in compiled code.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_compile.kernels import fp8_blocks
from fp8_compile.kernels.fp8_blocks import FP8Blocks

from .packed_experts import PackedStack
from .packed_linear import PackedLinear
from .uncompiled_product import autocast

NO_KERNEL = (
    "FP8 by blocks has no CPU kernel to export for exact inputs; use activations='fp8', or pack the original weights "
    "with format='fp8' or 'nvfp4'"
)


class FP8BlockLinear(PackedLinear):
    """codes e4m3 [N, K], scales fp32 [ceil(N / 128), ceil(K / 128)]."""

    packed = ("codes", "scales")
    codes: Tensor
    scales: Tensor

    @classmethod
    def convert(
        cls,
        layer: nn.Module,
        weight: FP8Blocks,
        dtype: torch.dtype,
        activations: str | None,
        input_scale: Tensor | None = None,
    ) -> None:
        assert activations in fp8_blocks.ACTIVATIONS and input_scale is None
        transposed = cls.is_transposed(layer)
        layer.__class__ = cls
        assert isinstance(layer, FP8BlockLinear)
        layer.transposed, layer.activations = transposed, activations
        n, k = weight.shape
        layer._become(k, n, dtype, {"codes": weight.codes, "scales": weight.scales})

    def matrix(self) -> FP8Blocks:
        return FP8Blocks(self.codes, self.scales)

    def forward(self, input: Tensor) -> Tensor:
        rows = autocast(input.reshape(-1, self.in_features))
        if self.activations is not None:
            rows = fp8_blocks.round_inputs_op(rows)
        y = F.linear(rows, self.dequantize(rows.dtype), self.bias_as(rows.dtype))
        return y.view(*input.shape[:-1], self.out_features)

    @property
    def static_inputs(self) -> bool | None:
        return None if self.activations is None else False

    @property
    def inputs(self) -> str:
        return "" if self.activations is None else "inputs e4m3, dynamic scale per 128 values"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return fp8_blocks.dequantize_op(self.codes, self.scales, dtype)

    def reason_against_export(self) -> str | None:
        return NO_KERNEL if self.activations is None else None


class FP8BlockStack(PackedStack):
    """codes e4m3 [E, N, K], scales fp32 [E, ceil(N / 128), ceil(K / 128)]."""

    packed = ("codes", "scales")
    codes: Tensor
    scales: Tensor

    @classmethod
    def of(cls, matrices: Sequence[FP8Blocks], dtype: torch.dtype, transposed: bool) -> FP8BlockStack:
        codes, scales = (torch.stack(parts) for parts in zip(*matrices))
        return cls(codes.shape, dtype, transposed, {"codes": codes, "scales": scales})

    def matrix(self, expert: int) -> FP8Blocks:
        return FP8Blocks(self.codes[expert], self.scales[expert])

    def dequantize(self, dtype: torch.dtype = torch.float32, which: Tensor | None = None) -> Tensor:
        codes, scales = self.codes, self.scales
        if which is not None:
            codes, scales = codes.view(torch.uint8)[which].view(codes.dtype), scales[which]
        return fp8_blocks.dequantize_op(codes, scales, dtype)

    def reason_against_export(self) -> str | None:
        return NO_KERNEL
