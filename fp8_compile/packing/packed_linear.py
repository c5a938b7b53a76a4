"""Linear layers whose weight is packed: NVFP4, or FP8.

    y = x @ dequantize(codes, scales).T + bias

Ordinary modules; what becomes of the packed parts when one is moved, saved or loaded: ``packed_weight.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8_compile.kernels import fp8_weight
from fp8_compile.kernels.fp8_inputs import ACTIVATIONS, round_inputs_op
from fp8_compile.kernels.nvfp4 import ops
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight

from .packed_weight import NVFP4Parts, PackedWeight


class PackedLinear(PackedWeight):
    """A linear layer with a packed weight. ``pack`` makes them out of ``nn.Linear``, in place."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    @property
    def weight(self) -> Tensor:
        """The weight, dequantized anew at each look: for code that reads a layer's weight."""
        return self.dequantize(self.dtype)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"

    def _become(self, in_features: int, out_features: int, dtype: torch.dtype, buffers: dict[str, Tensor]) -> None:
        """Make a layer of another class, which this one has been until now, one with these buffers."""
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self._parameters.pop("weight", None)
        if "bias" not in self._parameters:
            self.register_parameter("bias", None)
        for name, value in buffers.items():
            self.register_buffer(name, value)


class NVFP4Linear(NVFP4Parts, PackedLinear):
    """Weight in NVFP4."""

    @classmethod
    def convert(cls, layer: nn.Module, weight: NVFP4Weight, dtype: torch.dtype, activations: str | None) -> None:
        """Make an ``nn.Linear`` or Conv1D one of these: hooks, names and references to it stay."""
        layer.__class__ = cls
        assert isinstance(layer, NVFP4Linear)
        layer.activations, layer.layout, layer.block_size = activations, ops.STANDARD, weight.block_size
        parts = {"codes": weight.codes, "block_scales": weight.block_scales, "global_scale": weight.global_scale}
        layer._become(weight.columns, weight.codes.shape[0], dtype, parts)
        layer.use_layout(layer._best_layout())

    @property
    def nvfp4(self) -> NVFP4Weight:
        """The weight in the standard layout."""
        codes, block_scales = ops.to_standard(self.codes, self.block_scales, self.layout)
        return NVFP4Weight(codes, block_scales, self.global_scale, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)  # of a view in 3D F.linear makes a batched product
        if self.activations is not None:
            rows = ops.round_activations_op(rows, self.activations)
        return F.linear(rows, self._dequantized(input.dtype), self.bias).view(*input.shape[:-1], self.out_features)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._dequantized(dtype)

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        parts = self.codes, self.block_scales, self.global_scale
        return ops.dequantize_op(*parts, self.in_features, dtype, self.layout)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activations={self.activations}, layout={self.layout}"


class FP8Linear(PackedLinear):
    """Weight in E4M3, a scale a row: codes e4m3 [N, K], scales fp32 [N].

    ``activations="fp8"``: inputs are rounded to E4M3 too, by ``input_scale`` (fp32 [], a calibration's amax / 448), or
    where that is None each row by its own amax.
    """

    packed = ("codes", "scales")
    codes: Tensor
    scales: Tensor
    activations: str | None = None
    input_scale: Tensor | None

    @classmethod
    def convert(
        cls,
        layer: nn.Module,
        codes: Tensor,
        scales: Tensor,
        dtype: torch.dtype,
        activations: str | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        layer.__class__ = cls
        assert isinstance(layer, FP8Linear)
        layer._become(codes.shape[1], codes.shape[0], dtype, {"codes": codes, "scales": scales})
        layer.use_activations(activations, input_scale)

    def use_activations(self, activations: str | None, input_scale: Tensor | None = None) -> None:
        """Say how inputs are rounded."""
        assert activations in ACTIVATIONS and (activations or input_scale is None)
        self.activations = activations
        self.register_buffer("input_scale", input_scale)
        self.packed = (*type(self).packed, *(() if input_scale is None else ("input_scale",)))

    @property
    def inputs(self) -> str:
        """"" where inputs stay as they are; otherwise what they are rounded to, and by which scale."""
        if self.activations is None:
            return ""
        return "inputs e4m3, dynamic scale a row" if self.input_scale is None else "inputs e4m3, static scale"

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        if self.activations is not None:
            rows = round_inputs_op(rows, self.input_scale)
        return F.linear(rows, self.dequantize(input.dtype), self.bias).view(*input.shape[:-1], self.out_features)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return fp8_weight.dequantize_op(self.codes, self.scales, dtype)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), self.inputs)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if self.input_scale is not None and f"{prefix}input_scale" in state_dict:
            self.input_scale = self.input_scale.clone()  # what is loaded need not be what siblings get
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
