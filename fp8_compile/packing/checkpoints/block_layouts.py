"""FP8 by 128 x 128 blocks in checkpoints.

    X.weight e4m3 [N, K], X.weight_scale      [ceil(N / 128), ceil(K / 128)]    compressed-tensors, FP8_BLOCK
    X.weight e4m3 [N, K], X.weight_scale_inv  the same, also a multiplier       DeepSeek, Qwen3-FP8; read only
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from fp8_compile.kernels.fp8_blocks import BLOCK, FP8Blocks

from .layouts import WIDE, Described, Layout, described_by_compressed_tensors


class BlocksInCompressedTensors(Layout[FP8Blocks]):
    name = "compressed-tensors"
    parts = ("weight", "weight_scale")
    own = ("weight_scale",)

    def is_told_by(self, layer: str, part: str, names: Mapping[str, Any]) -> bool:
        """Scales by rows have the same name: the shapes tell."""
        codes, scales = names.get(f"{layer}.weight"), names.get(f"{layer}.weight_scale")
        if part not in self.own or not isinstance(codes, Tensor) or not isinstance(scales, Tensor):
            return False
        e4m3 = codes.dtype == torch.float8_e4m3fn and codes.dim() == scales.dim() == 2
        return e4m3 and scales.numel() > 1 and tuple(scales.shape) == _blocks(codes.shape)

    def tensors(self, layer: str, weight: FP8Blocks, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        return {f"{layer}.{part}": tensor for part, tensor in zip(self.parts, (weight.codes, weight.scales))}

    def described(self, layer: str, shape: Sequence[int]) -> Described:
        kinds = (torch.float8_e4m3fn, (shape[0], shape[1])), (torch.float32, _blocks(shape))
        return {f"{layer}.{part}": kind for part, kind in zip(self.parts, kinds)}

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> FP8Blocks:
        codes, scales = (tensors[f"{layer}.{part}"] for part in self.parts)
        expected = _blocks(codes.shape) if codes.dim() == 2 else None
        if codes.dtype != torch.float8_e4m3fn or scales.dtype not in WIDE or tuple(scales.shape) != expected:
            raise ValueError(
                f"{layer}: expected FP8 by blocks of {BLOCK} x {BLOCK}, codes e4m3 [N, K] and scales "
                f"[ceil(N / {BLOCK}), ceil(K / {BLOCK})], got {codes.dtype} {tuple(codes.shape)} and {scales.dtype} "
                f"{tuple(scales.shape)}"
            )
        wide = scales.to(torch.float32)
        if not bool(wide.isfinite().all()):
            raise ValueError(f"{layer}: its {self.parts[1]} has values that are not finite; save the checkpoint again")
        return FP8Blocks(codes, wide.contiguous())

    def scheme(self, static_inputs: bool | None = None) -> dict[str, Any]:
        """Servers round inputs to FP8 here, by groups of 128 as they come: they have no product with exact ones."""
        weights = {"num_bits": 8, "strategy": "block", "block_structure": [BLOCK, BLOCK]}
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": BLOCK}
        return described_by_compressed_tensors("float-quantized", weights, {**inputs, "dynamic": True})


class BlocksOfDeepSeek(BlocksInCompressedTensors):
    parts = ("weight", "weight_scale_inv")
    own = ("weight_scale_inv",)

    def is_told_by(self, layer: str, part: str, names: Mapping[str, Any]) -> bool:
        return part in self.own


def _blocks(shape: Sequence[int]) -> tuple[int, int]:
    n, k = shape
    return -(-n // BLOCK), -(-k // BLOCK)


BLOCK_LAYOUTS = BlocksInCompressedTensors(), BlocksOfDeepSeek()
