"""Modules whose weight is FP8 by blocks, 128 x 128 or MXFP8: linear layers, and stacks of experts.

They hold what checkpoints hold, bit for bit. Compiled for a CPU, a layer with rounded inputs runs by the gemm of the
recipe of the same blocks; otherwise the weight is dequantized for each product, also in compiled code.
"""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8_compile.kernels import fp8_blocks, mx_weight
from fp8_compile.kernels.fp8_blocks import FP8Blocks
from fp8_compile.kernels.mx_weight import MXWeight

from .packed_experts import PackedStack
from .packed_linear import PackedLinear
from .packed_weight import PackedWeight
from .uncompiled_product import autocast


class BlockScaled(PackedWeight):
    """Codes e4m3, and scales of blocks of them, of one matrix or a stack."""

    packed = ("codes", "scales")
    codes: Tensor
    scales: Tensor
    activations: str | None = None
    kernels: ClassVar[ModuleType]  # the formulas of the format
    title: ClassVar[str]
    words: ClassVar[str]  # of rounded inputs, in reports

    @property
    def static_inputs(self) -> bool | None:
        return None if self.activations is None else False

    @property
    def inputs(self) -> str:
        return "" if self.activations is None else self.words

    def dequantize(self, dtype: torch.dtype = torch.float32, which: Tensor | None = None) -> Tensor:
        codes, scales = self.codes, self.scales
        if which is not None:
            codes, scales = codes.view(torch.uint8)[which].view(codes.dtype), scales[which]
        found: Tensor = self.kernels.dequantize_op(codes, scales, dtype)
        return found

    def reason_against_export(self) -> str | None:
        if self.activations is not None:
            return None
        return (
            f"{self.title} has no CPU kernel to export for experts and for layers with exact inputs; pack layers with "
            f"activations={self.kernels.ACTIVATIONS[1]!r}, or the original weights with format='fp8' or 'nvfp4'"
        )


class BlockScaledLinear(BlockScaled, PackedLinear):
    """A linear layer: codes [N, K]."""

    def forward(self, input: Tensor) -> Tensor:
        rows = autocast(input.reshape(-1, self.in_features))
        if self.activations is not None:
            rows = self.kernels.round_inputs_op(rows)
        y = F.linear(rows, self.dequantize(rows.dtype), self.bias_as(rows.dtype))
        return y.view(*input.shape[:-1], self.out_features)


class FP8BlockLinear(BlockScaledLinear):
    """scales fp32 [ceil(N / 128), ceil(K / 128)]."""

    kernels: ClassVar[ModuleType] = fp8_blocks
    title = "FP8 by blocks"
    matrix_type = FP8Blocks
    words = "inputs e4m3, dynamic scale per 128 values"


class FP8BlockStack(BlockScaled, PackedStack):
    """codes [E, N, K], scales fp32 [E, ceil(N / 128), ceil(K / 128)]."""

    kernels: ClassVar[ModuleType] = fp8_blocks
    title = "FP8 by blocks"
    matrix_type = FP8Blocks


class MXFP8Linear(BlockScaledLinear):
    """scales uint8 [N, ceil(K / 32)], or one per tile of 32 x 32. Values are exact in bf16 and FP32."""

    kernels: ClassVar[ModuleType] = mx_weight
    title = "MXFP8"
    matrix_type = MXWeight
    words = "inputs mxfp8"


class MXFP8Stack(BlockScaled, PackedStack):
    """codes [E, N, K], scales uint8 [E, N, ceil(K / 32)], or per tile. ``activations="mxfp8"``: what experts multiply
    is rounded, as training has it."""

    kernels: ClassVar[ModuleType] = mx_weight
    title = "MXFP8"
    matrix_type = MXWeight
    words = "inputs mxfp8"

    def use_activations(self, activations: str | None) -> None:
        self.activations = activations

    def dequantize(self, dtype: torch.dtype = torch.float32, which: Tensor | None = None) -> Tensor:
        if self.activations is not None and torch.compiler.is_compiling():  # passes round what is multiplied by it
            made: Tensor = mx_weight.dequantize_rounding_op(self.codes, self.scales, dtype, which)
            return made
        return super().dequantize(dtype, which)

    def round_inputs(self, x: Tensor) -> Tensor:
        rounded: Tensor = mx_weight.round_inputs_op(x.reshape(-1, x.shape[-1])).view(x.shape)
        return rounded
