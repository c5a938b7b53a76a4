"""Linear layers whose weight is packed: NVFP4, or FP8.

    y = x @ dequantize(codes, scales).T + bias

They are ordinary modules; ``packed_weight.py`` says what becomes of the packed parts when one is moved, saved or
loaded.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_compile.kernels import fp8_weight
from fp8_compile.kernels.cpu.large_pages import in_large_pages
from fp8_compile.kernels.fp8_inputs import round_inputs_op
from fp8_compile.kernels.fp8_weight import FP8Weight
from fp8_compile.kernels.nvfp4 import ops
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight

from .linear_layers import is_conv1d
from .packed_weight import Matrix, NVFP4Parts, PackedWeight
from .static_inputs import FP8Parts
from .uncompiled_product import autocast, product

# What a layer has beside its buffers, where its format knows it.
FIELDS = ("in_features", "out_features", "dtype", "activations", "layout", "block_size", "transposed")


class PackedLinear(PackedWeight):
    """A linear layer with a packed weight. ``pack`` makes them out of ``nn.Linear``, in place."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None
    activations: str | None = None
    transposed: bool = False  # True if the weight was [K, N] before it was packed: Conv1D

    @classmethod
    def convert(
        cls,
        layer: nn.Module,
        weight: Any,
        dtype: torch.dtype,
        activations: str | None,
        input_scale: Tensor | None = None,
    ) -> None:
        """Make an ``nn.Linear`` or Conv1D one of these: hooks, names and references to it stay.

        ``weight`` is the matrix in the class's format, ``dtype`` the one that it had, ``input_scale`` the static scale
        of its inputs, where the format knows one.
        """
        transposed = cls.is_transposed(layer)
        layer.__class__ = cls
        assert isinstance(layer, PackedLinear)
        layer.transposed, layer.dtype = transposed, dtype
        layer.out_features, layer.in_features = weight.shape
        layer._parameters.pop("weight", None)
        if "bias" not in layer._parameters:
            layer.register_parameter("bias", None)
        for name in cls.packed:
            layer.register_buffer(name, getattr(weight, name))
        layer.use_activations(activations, input_scale)

    @property
    def weight(self) -> Tensor:
        """The weight, dequantized again at each access: for code that reads a layer's weight."""
        return self.dequantize(self.dtype)

    def matrix(self) -> Matrix:
        """The packed weight in the standard layout."""
        made: Matrix = self.matrix_type(*(getattr(self, name) for name in type(self).packed))
        return made

    @property
    def static_scale(self) -> Tensor | None:
        """The scale of inputs that are rounded by a static one, fp32 []."""
        return self._buffers.get("input_scale")

    @property
    def static_inputs(self) -> bool | None:
        """True where inputs are rounded by a static scale, False by one per row, None where checkpoints don't say."""
        return None

    @property
    def inputs(self) -> str:
        """What reports say about the rounding of inputs; empty if there is nothing to say."""
        return ""

    def use_activations(self, activations: str | None, input_scale: Tensor | None = None) -> None:
        """Say how inputs are rounded."""
        self.activations = activations

    def lend(self, layer: nn.Module) -> PackedLinear:
        """Make a layer, whose weight was tied to this one's, what this one has become: on the same tensors, with its
        own bias."""
        bias = layer._parameters.get("bias")
        layer.__class__ = type(self)
        layer._parameters = {"bias": bias}
        layer._buffers = dict(self._buffers)
        for field in FIELDS:
            if field in vars(self):
                setattr(layer, field, getattr(self, field))
        return cast(PackedLinear, layer)

    def multiply(self, rows: Tensor) -> Tensor:
        """rows [M, K] times the transposed weight, from its packed form, with a gradient."""
        raise NotImplementedError

    def bias_as(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.bias is None else self.bias.to(dtype)

    @staticmethod
    def is_transposed(layer: nn.Module) -> bool:
        """True if a layer, packed or not, has or had its weight as [K, N]."""
        return layer.transposed if isinstance(layer, PackedLinear) else is_conv1d(layer)

    def _times_weight(self, rows: Tensor) -> Tensor:
        """``rows @ weight.T + bias``. Under a compiler it is written out: what becomes of it is up to the passes."""
        if torch.compiler.is_compiling():
            return F.linear(rows, self.dequantize(rows.dtype), self.bias)
        y = self.multiply(autocast(rows))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class NVFP4Linear(NVFP4Parts, PackedLinear):
    """Weight in NVFP4."""

    @classmethod
    def convert(
        cls,
        layer: nn.Module,
        weight: NVFP4Weight,
        dtype: torch.dtype,
        activations: str | None,
        input_scale: Tensor | None = None,
    ) -> None:
        if input_scale is not None and activations == "nvfp4":  # "int8" has scales of its own
            from .packed_nvfp4_inputs import NVFP4InputsLinear

            NVFP4InputsLinear.convert(layer, weight, dtype, None, input_scale)
            return
        super().convert(layer, weight, dtype, activations)
        assert isinstance(layer, NVFP4Linear)
        layer.layout, layer.block_size = ops.STANDARD, weight.block_size
        layer.use_best_layout()

    def matrix(self) -> NVFP4Weight:
        codes, block_scales = ops.to_standard(self.codes, self.block_scales, self.layout)
        return NVFP4Weight(codes, block_scales, self.global_scale, self.in_features)

    @property
    def nvfp4(self) -> NVFP4Weight:
        """The weight in the standard layout."""
        return self.matrix()

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)  # of a view in 3D F.linear makes a batched product
        if self.activations is not None:
            rows = ops.round_activations_op(rows, self.activations)
        return self._times_weight(rows).view(*input.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor) -> Tensor:
        columns, layout = self.in_features, self.layout
        return product(
            rows,
            lambda x, *parts: ops.mm_op(x, *parts, None, None, layout),
            lambda grad, *parts: ops.mm_grad_op(grad, *parts, columns, layout),
            *(self.codes, self.block_scales, self.global_scale),
        )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        parts = self.codes, self.block_scales, self.global_scale
        return ops.dequantize_op(*parts, self.in_features, dtype, self.layout)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activations={self.activations}, layout={self.layout}"


class FP8Linear(FP8Parts, PackedLinear):
    """Weight in FP8, one scale per row."""

    @classmethod
    def convert(
        cls,
        layer: nn.Module,
        weight: FP8Weight,
        dtype: torch.dtype,
        activations: str | None,
        input_scale: Tensor | None = None,
    ) -> None:
        placed = FP8Weight(in_large_pages(weight.codes), weight.scales)
        super().convert(layer, placed, dtype, activations, input_scale)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        if self.activations is not None:
            rows = round_inputs_op(autocast(rows), self.input_scale)
        return self._times_weight(rows).view(*input.shape[:-1], self.out_features)

    def multiply(self, rows: Tensor) -> Tensor:
        parts = self.codes, self.scales
        return product(rows, lambda x, *parts: fp8_weight.mm_op(x, *parts, None), fp8_weight.mm_grad_op, *parts)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return fp8_weight.dequantize_op(self.codes, self.scales, dtype)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), self.inputs)))
