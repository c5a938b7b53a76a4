"""MXFP8 in checkpoints.

    X.weight e4m3 [N, K], X.weight_scale uint8 [N, K / 32], byte b stands for 2**(b - 127)    compressed-tensors

Tiles of 32 x 32, as training has them, are stored with the scale of a tile for each of its rows.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from fp8_compile.kernels.mx_weight import MXWeight, by_rows, by_tiles
from fp8_compile.kernels.mxfp8 import NAN, SIZE

from .layouts import Described, Layout, described_by_compressed_tensors

SCALES = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
GROUP = {"num_bits": 8, "strategy": "group", "group_size": SIZE, **SCALES}


class MXInCompressedTensors(Layout[MXWeight]):
    name = "compressed-tensors"
    parts = ("weight", "weight_scale")
    own = ("weight_scale",)

    def is_told_by(self, layer: str, part: str, names: Mapping[str, Any]) -> bool:
        """FP8 by rows and by blocks has the same names, and scales that are floats."""
        codes, scales = names.get(f"{layer}.weight"), names.get(f"{layer}.weight_scale")
        if part not in self.own or not isinstance(codes, Tensor) or not isinstance(scales, Tensor):
            return False
        return codes.dtype == torch.float8_e4m3fn and scales.dtype in (torch.uint8, torch.float8_e8m0fnu)

    def tensors(self, layer: str, weight: MXWeight, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        if weight.shape[1] % SIZE:
            raise ValueError(
                f"{layer}: checkpoints hold MXFP8 with K a multiple of {SIZE}, got K={weight.shape[1]}; exclude the "
                "layer from packing, or pack with format='fp8'"
            )
        return {f"{layer}.{part}": tensor for part, tensor in zip(self.parts, by_rows(weight))}

    def described(self, layer: str, shape: Sequence[int]) -> Described:
        n, k = shape
        kinds = (torch.float8_e4m3fn, (n, k)), (torch.uint8, (n, k // SIZE))
        return {f"{layer}.{part}": kind for part, kind in zip(self.parts, kinds)}

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> MXWeight:
        codes, scales = (tensors[f"{layer}.{part}"] for part in self.parts)
        expected = (codes.shape[0], codes.shape[1] // SIZE) if codes.dim() == 2 and codes.shape[1] % SIZE == 0 else None
        if codes.dtype != torch.float8_e4m3fn or scales.dtype.itemsize != 1 or tuple(scales.shape) != expected:
            raise ValueError(
                f"{layer}: expected MXFP8, codes e4m3 [N, K] and scales uint8 [N, K / {SIZE}], got {codes.dtype} "
                f"{tuple(codes.shape)} and {scales.dtype} {tuple(scales.shape)}"
            )
        bytes_of_scales = scales.view(torch.uint8)
        if bool((bytes_of_scales == NAN).any()):
            raise ValueError(f"{layer}: its {self.parts[1]} has NaN among its scales; save the checkpoint again")
        return by_tiles(MXWeight(codes, bytes_of_scales.contiguous()))

    def scheme(self, static_inputs: bool | None = None) -> dict[str, Any]:
        inputs = {"type": "float", "symmetric": True, "dynamic": True, **GROUP} if static_inputs is False else None
        return described_by_compressed_tensors("mxfp8-quantized", GROUP, inputs)


MX_LAYOUTS = (MXInCompressedTensors(),)
