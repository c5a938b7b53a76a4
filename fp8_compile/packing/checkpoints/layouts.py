"""How other tools store a packed weight: names, conventions, configuration.

    compressed-tensors   X.weight_packed, X.weight_scale, X.weight_global_scale = 1 / global     vLLM, transformers
    modelopt             X.weight,        X.weight_scale, X.weight_scale_2      = global         vLLM, TensorRT-LLM,
    SGLang

Codes (uint8 [N, K/2]) and block scales (e4m3 [N, K/16]) are the same bytes in both. Without a scale of the inputs the
weights alone are quantized: NVFP4A16 in compressed-tensors' words, W4A16_NVFP4 in modelopt's. With one (a calibration's
amax / (448 * 6)) servers round inputs to NVFP4, too: X.input_global_scale, a divisor, or X.input_scale, a multiplier.
FP8 weights: X.weight e4m3 [N, K], X.weight_scale fp32 [N, 1], modelopt's [N]; of FP8 inputs X.input_scale fp32 [1]
where it is static (compressed-tensors).
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Generic, Mapping, Sequence, TypeVar

import torch
from torch import Tensor

from fp8_compile.kernels.fp8_weight import FP8Weight
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.packing.packed_weight import Matrix

WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes of numbers that are not codes
M = TypeVar("M", bound=Matrix)
Described = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class Layout(abc.ABC, Generic[M]):
    """How one format is stored under one of the names that ``save_checkpoint`` takes."""

    name: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]  # what the tensors of a layer's weight are called
    own: ClassVar[tuple[str, ...]]  # those of them by which the layout is known

    def is_told_by(self, layer: str, part: str, names: Mapping[str, Any]) -> bool:
        """True if the tensor ``layer.part`` says that the layer is stored in this layout."""
        return part in self.own

    @abc.abstractmethod
    def tensors(self, layer: str, weight: M, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        """The tensors that stand for one layer's weight, and for the static scale of its inputs."""

    @abc.abstractmethod
    def described(self, layer: str, shape: Sequence[int]) -> Described:
        """Dtypes and shapes of ``tensors``, before they are computed."""

    @abc.abstractmethod
    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> M:
        """One layer's weight out of a checkpoint's tensors; a ValueError where they can't be one."""

    def read_input_scale(self, layer: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The static scale of a layer's inputs, fp32 [], where the layout has one that we use."""
        return None

    @abc.abstractmethod
    def scheme(self, static_inputs: bool | None = None) -> dict[str, Any]:
        """What configurations say of a layer that is stored like this, in the layout's words; ``static_inputs`` as in
        ``PackedLinear``."""


class _NVFP4(Layout[NVFP4Weight]):
    """Codes, block scales, global scale, under the names in ``parts``."""

    of_inputs: ClassVar[str]  # the name of the inputs' global scale

    def tensors(self, layer: str, weight: NVFP4Weight, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        if weight.columns % 16 or weight.block_size != 16:
            raise ValueError(
                f"{layer}: checkpoints hold NVFP4 in blocks of 16 with K a multiple of 16, got K={weight.columns} in "
                f"blocks of {weight.block_size}; exclude the layer from packing, or pack with block_size=16"
            )
        parts = weight.codes, weight.block_scales, self._stored(weight.global_scale)
        inputs = {} if input_scale is None else {f"{layer}.{self.of_inputs}": self._stored(input_scale).clone()}
        return {f"{layer}.{part}": tensor for part, tensor in zip(self.parts, parts)} | inputs

    def described(self, layer: str, shape: Sequence[int]) -> Described:
        n, k = shape
        scale = self._stored(torch.ones(()))
        kinds = (torch.uint8, (n, k // 2)), (torch.float8_e4m3fn, (n, k // 16)), (scale.dtype, tuple(scale.shape))
        return {f"{layer}.{part}": kind for part, kind in zip(self.parts, kinds)}

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> NVFP4Weight:
        codes, scales, scale = (tensors[f"{layer}.{part}"] for part in self.parts)
        sizes = (codes.shape[0], codes.shape[1] // 8) if codes.dim() == 2 else None
        dtypes = codes.dtype == torch.uint8 and scales.dtype in (torch.float8_e4m3fn, *WIDE) and scale.dtype in WIDE
        if tuple(scales.shape) != sizes or scale.numel() != 1 or not dtypes or codes.shape[1] % 8:
            raise ValueError(
                f"{layer}: expected NVFP4 with blocks of 16, codes uint8 [N, K/2], scales e4m3 [N, K/16] and one "
                f"global scale, got {codes.dtype} {tuple(codes.shape)}, {scales.dtype} {tuple(scales.shape)} and "
                f"{scale.dtype} {tuple(scale.shape)}"
            )
        given = scale.to(torch.float32).reshape(())
        global_scale = self._read(given)
        if not 0 < float(global_scale) < float("inf"):
            got = f"{self.parts[2]}={float(given)}"
            raise ValueError(f"{layer}: expected a global scale above 0 that is finite, got {got}")
        return NVFP4Weight(codes, scales.to(torch.float8_e4m3fn), global_scale, 2 * codes.shape[1])

    def read_input_scale(self, layer: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
        scale = tensors.get(f"{layer}.{self.of_inputs}")
        if scale is None:
            return None
        value = scale.to(torch.float32).reshape(-1) if scale.dtype in WIDE else torch.empty(0)
        if value.numel() != 1 or not 0 < float(value) < float("inf"):
            raise ValueError(
                f"{layer}: expected one finite number above 0 as {self.of_inputs}, got {scale.dtype} "
                f"{tuple(scale.shape)}{f', {float(value)}' if value.numel() == 1 else ''}"
            )
        return self._read(value.reshape(()))

    @abc.abstractmethod
    def _stored(self, global_scale: Tensor) -> Tensor:
        """The global scale as the layout has it."""

    @abc.abstractmethod
    def _read(self, stored: Tensor) -> Tensor:
        """The inverse of ``_stored``, fp32 []."""


class NVFP4InCompressedTensors(_NVFP4):
    name = "compressed-tensors"
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    own = ("weight_packed", "weight_global_scale")
    of_inputs = "input_global_scale"

    def _stored(self, global_scale: Tensor) -> Tensor:
        return global_scale.reciprocal().reshape(1)

    def _read(self, stored: Tensor) -> Tensor:
        return stored.reciprocal()

    def scheme(self, static_inputs: bool | None = None) -> dict[str, Any]:
        scales = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        blocks = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, **scales}
        inputs = {"type": "float", "symmetric": True, "dynamic": "local", **blocks} if static_inputs else None
        return described_by_compressed_tensors("nvfp4-pack-quantized", blocks, inputs)


class NVFP4InModelOpt(_NVFP4):
    name = "modelopt"
    parts = ("weight", "weight_scale", "weight_scale_2")
    own = ("weight_scale_2",)
    of_inputs = "input_scale"

    def _stored(self, global_scale: Tensor) -> Tensor:
        return global_scale.reshape(())

    def _read(self, stored: Tensor) -> Tensor:
        return stored

    def scheme(self, static_inputs: bool | None = None) -> dict[str, Any]:
        return {"quant_algo": "NVFP4" if static_inputs else "W4A16_NVFP4", "group_size": 16}


NVFP4_LAYOUTS = NVFP4InCompressedTensors(), NVFP4InModelOpt()


class FP8InCompressedTensors(Layout[FP8Weight]):
    name = "compressed-tensors"
    parts = ("weight", "weight_scale")
    own: ClassVar[tuple[str, ...]] = ("weight_scale",)
    others = tuple(part for layout in NVFP4_LAYOUTS for part in layout.own)  # with one of these it is not FP8's scale
    inputs: ClassVar[dict[bool | None, dict[str, Any] | None]] = {  # by ``static_inputs``
        None: None,
        True: {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
        False: {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    }

    def is_told_by(self, layer: str, part: str, names: Mapping[str, Any]) -> bool:
        return part in self.own and not any(f"{layer}.{other}" in names for other in self.others)

    def tensors(self, layer: str, weight: FP8Weight, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        inputs = {} if input_scale is None else {f"{layer}.input_scale": input_scale.reshape(1).clone()}
        return {f"{layer}.weight": weight.codes, f"{layer}.weight_scale": weight.scales[:, None], **inputs}

    def described(self, layer: str, shape: Sequence[int]) -> Described:
        n, k = shape
        return {f"{layer}.weight": (torch.float8_e4m3fn, (n, k)), f"{layer}.weight_scale": (torch.float32, (n, 1))}

    def read(self, layer: str, tensors: Mapping[str, Tensor]) -> FP8Weight:
        """Codes [N, K] and scales fp32 [N]; one scale for the whole matrix becomes one per row."""
        codes, scales = tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"]
        rows = codes.shape[0] if codes.dim() == 2 else None
        shapes = rows is not None and tuple(scales.shape) in ((), (1,), (1, 1), (rows,), (rows, 1))
        if codes.dtype != torch.float8_e4m3fn or not shapes or scales.dtype not in WIDE:
            half = " (or a weight_scale_2, of NVFP4 in modelopt's layout)" if codes.dtype == torch.uint8 else ""
            raise ValueError(
                f"{layer}: expected FP8 with one scale per row or one for all, codes e4m3 [N, K] and scales [N, 1], "
                f"[N] or [1]{half}, got {codes.dtype} {tuple(codes.shape)} and {scales.dtype} {tuple(scales.shape)}"
            )
        wide = scales.to(torch.float32)
        if not bool(wide.isfinite().all()):
            raise ValueError(f"{layer}: its weight_scale has values that are not finite; save the checkpoint again")
        return FP8Weight(codes, wide.reshape(-1).expand(codes.shape[0]).contiguous())

    def read_input_scale(self, layer: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
        scale = tensors.get(f"{layer}.input_scale")
        if scale is None:
            return None
        value = scale.to(torch.float32).reshape(-1) if scale.dtype in WIDE else torch.empty(0)
        if value.numel() != 1 or not 0 < float(value) < float("inf"):
            raise ValueError(
                f"{layer}: expected one finite number above 0 as input_scale, got {scale.dtype} {tuple(scale.shape)}"
                f"{f', {float(value)}' if value.numel() == 1 else ''}"
            )
        return value.reshape(())

    def scheme(self, static_inputs: bool | None = None) -> dict[str, Any]:
        weights = {"num_bits": 8, "strategy": "channel"}
        return described_by_compressed_tensors("float-quantized", weights, self.inputs[static_inputs])


class FP8InModelOpt(FP8InCompressedTensors):
    """X.weight e4m3 [N, K], X.weight_scale fp32 [N]; inputs are rounded by one scale per token.

    With static inputs modelopt has one scale for a whole matrix, which ours are not. What is read tells nothing of
    the layout: both have the same names.
    """

    name = "modelopt"
    own = ()

    def tensors(self, layer: str, weight: FP8Weight, input_scale: Tensor | None = None) -> dict[str, Tensor]:
        if input_scale is not None:
            raise ValueError(
                f"{layer}: layout='modelopt' holds FP8 with static inputs only where the weight has one scale for all "
                "rows, and this one has a scale per row; use layout='compressed-tensors', or pack without a calibration"
            )
        return {f"{layer}.weight": weight.codes, f"{layer}.weight_scale": weight.scales}

    def described(self, layer: str, shape: Sequence[int]) -> Described:
        n, k = shape
        return {f"{layer}.weight": (torch.float8_e4m3fn, (n, k)), f"{layer}.weight_scale": (torch.float32, (n,))}

    def scheme(self, static_inputs: bool | None = None) -> dict[str, Any]:
        return {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}


FP8_LAYOUTS = FP8InCompressedTensors(), FP8InModelOpt()


def described_by_compressed_tensors(
    stored: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """One of ``config_groups``, without its targets."""
    weights = {"type": "float", "symmetric": True, "dynamic": False, **weights}
    return {"weights": weights, "input_activations": inputs, "output_activations": None, "format": stored}
