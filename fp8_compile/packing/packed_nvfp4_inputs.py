"""A linear layer with weight and inputs in NVFP4, inputs as training and servers round them.

    rows = round(x * enc);   y = rows @ (dequantize(codes, block_scales, global_scale / enc)).T + bias

``enc`` is one number per layer (``input_scale`` is its reciprocal), or follows from the tensor where that is None.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_compile.kernels.nvfp4 import ops
from fp8_compile.kernels.nvfp4.inputs import round_inputs_op
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.kernels.nvfp4_training import FOUR_OF_SIX, global_scale

from .packed_linear import NVFP4Linear
from .static_inputs import StaticInputs
from .uncompiled_product import autocast, product


class NVFP4InputsLinear(StaticInputs, NVFP4Linear):
    """codes uint8 [N, K'/2], block_scales e4m3 [N, K'/16], global_scale fp32 []; input_scale fp32 []."""

    four_over_six: bool  # inputs choose between two scales per block

    @classmethod
    def convert(
        cls,
        layer: nn.Module,
        weight: NVFP4Weight,
        dtype: torch.dtype,
        activations: str | None,
        input_scale: Tensor | None = None,
        *,
        four_over_six: bool = False,
    ) -> None:
        NVFP4Linear.convert(layer, weight, dtype, None)
        layer.__class__ = cls
        assert isinstance(layer, NVFP4InputsLinear)
        layer.four_over_six = four_over_six
        layer.use_activations(activations, input_scale)

    def use_activations(self, activations: str | None, input_scale: Tensor | None = None) -> None:
        """``activations`` stay None, so that the weight is stored as products with exact inputs want it."""
        super().use_activations(None, input_scale)

    def lend(self, layer: nn.Module) -> NVFP4InputsLinear:
        lent = super().lend(layer)
        assert isinstance(lent, NVFP4InputsLinear)
        lent.four_over_six = self.four_over_six
        return lent

    @property
    def static_inputs(self) -> bool | None:
        return None if self.input_scale is None else True

    @property
    def inputs(self) -> str:
        return "inputs nvfp4, dynamic scale" if self.input_scale is None else "inputs nvfp4, static scale"

    def forward(self, input: Tensor) -> Tensor:
        rows = autocast(input.reshape(-1, self.in_features))
        enc = self._enc(rows.detach())
        rows = round_inputs_op(rows, enc, self.four_over_six)
        scale = self.global_scale * enc.reciprocal().reshape(())
        y = self._product(rows, scale)
        return y.view(*input.shape[:-1], self.out_features)

    def _enc(self, rows: Tensor) -> Tensor:
        if self.input_scale is not None:
            return self.input_scale.reciprocal().reshape(1, 1)
        enc = global_scale(rows)[0]
        return enc * FOUR_OF_SIX if self.four_over_six else enc

    def _product(self, rows: Tensor, scale: Tensor) -> Tensor:
        columns, layout = self.in_features, self.layout
        if torch.compiler.is_compiling():
            weight = ops.dequantize_op(self.codes, self.block_scales, scale, columns, rows.dtype, layout)
            return F.linear(rows, weight, self.bias_as(rows.dtype))
        y = product(
            rows,
            lambda x, *parts: ops.mm_op(x, *parts, None, None, layout),
            lambda grad, *parts: ops.mm_grad_op(grad, *parts, columns, layout),
            *(self.codes, self.block_scales, scale),
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.inputs}"
