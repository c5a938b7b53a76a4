"""How other tools store a packed weight: names, conventions, configuration.

    compressed-tensors   X.weight_packed, X.weight_scale, X.weight_global_scale = 1 / global     vLLM, transformers
    modelopt             X.weight,        X.weight_scale, X.weight_scale_2      = global         vLLM, TensorRT-LLM,
    SGLang

Codes (uint8 [N, K/2]) and block scales (e4m3 [N, K/16]) are the same bytes in both. Weights alone are quantized:
NVFP4A16 in compressed-tensors' words, W4A16_NVFP4 in modelopt's. FP8 weights go to compressed-tensors only: X.weight
e4m3 [N, K], X.weight_scale fp32 [N, 1]; of FP8 inputs X.input_scale fp32 [1] where it is static.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import torch
from torch import Tensor

from fp8_compile.kernels.nvfp4.weight import NVFP4Weight

LAYOUTS = ("compressed-tensors", "modelopt")
PARTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "fp8": ("weight", "weight_scale"),
}
WIDE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # dtypes of numbers that are not codes


def nvfp4_tensors(name: str, weight: NVFP4Weight, layout: str) -> dict[str, Tensor]:
    """The tensors that stand for one layer's weight."""
    _check_storable(name, weight)
    if layout == "modelopt":
        return {
            f"{name}.weight": weight.codes,
            f"{name}.weight_scale": weight.block_scales,
            f"{name}.weight_scale_2": weight.global_scale.reshape(()),
        }
    return {
        f"{name}.weight_packed": weight.codes,
        f"{name}.weight_scale": weight.block_scales,
        f"{name}.weight_global_scale": weight.global_scale.reciprocal().reshape(1),
    }


def nvfp4_described(name: str, shape: Sequence[int], layout: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of ``nvfp4_tensors``, before they are computed."""
    n, k = shape
    codes, scales = (torch.uint8, (n, k // 2)), (torch.float8_e4m3fn, (n, k // 16))
    if layout == "modelopt":
        parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": (torch.float32, ())}
    else:
        parts = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": (torch.float32, (1,))}
    return {f"{name}.{part}": what for part, what in parts.items()}  # type: ignore[misc]


def fp8_tensors(
    name: str, codes: Tensor, scales: Tensor, input_scale: Tensor | None, layout: str
) -> dict[str, Tensor]:
    if layout != "compressed-tensors":
        raise ValueError(
            f"{name}: FP8 weights with a scale a row are stored by layout='compressed-tensors', got {layout!r}"
        )
    inputs = {} if input_scale is None else {f"{name}.input_scale": input_scale.reshape(1).clone()}
    return {f"{name}.weight": codes, f"{name}.weight_scale": scales[:, None], **inputs}


def packed_layers(names: Mapping[str, Any]) -> dict[str, str]:
    """Layers with packed weights among a checkpoint's tensors, by the layout they are in; "fp8" is one too."""
    found = {}
    for key in names:
        layer, _, part = key.rpartition(".")
        others = {f"{layer}.{other}" for other in ("weight_packed", "weight_global_scale", "weight_scale_2")}
        if part in ("weight_packed", "weight_global_scale"):
            found[layer] = "compressed-tensors"
        elif part == "weight_scale_2":
            found[layer] = "modelopt"
        elif part == "weight_scale" and others.isdisjoint(names):
            found[layer] = "fp8"
    return found


def check_whole(found: Mapping[str, str], names: Mapping[str, Any], where: Mapping[str, Any]) -> None:
    """Raise where a layer lacks a part; ``where`` has the file that each tensor is in."""
    for layer, layout in found.items():
        lacking = [part for part in PARTS[layout] if f"{layer}.{part}" not in names]
        there = [part for part in PARTS[layout] if f"{layer}.{part}" in names]
        if lacking:
            file = where.get(f"{layer}.{there[0]}", "the checkpoint")
            raise ValueError(
                f"{file}: {layer} has {', '.join(there)}, but no file of the checkpoint has its {', '.join(lacking)}; "
                "copy the checkpoint again, or save it again"
            )


def nvfp4_from(name: str, tensors: Mapping[str, Tensor], layout: str) -> NVFP4Weight:
    """One layer's weight out of a checkpoint's tensors."""
    codes, scales, scale = (tensors[f"{name}.{part}"] for part in PARTS[layout])
    shapes = codes.dim() == 2 and tuple(scales.shape) == (codes.shape[0], codes.shape[1] // 8) and scale.numel() == 1
    dtypes = codes.dtype == torch.uint8 and scales.dtype in (torch.float8_e4m3fn, *WIDE) and scale.dtype in WIDE
    if not shapes or not dtypes or codes.shape[1] % 8:
        raise ValueError(
            f"{name}: expected NVFP4 with blocks of 16, codes uint8 [N, K/2], scales e4m3 [N, K/16] and one global "
            f"scale, got {codes.dtype} {tuple(codes.shape)}, {scales.dtype} {tuple(scales.shape)} and {scale.dtype} "
            f"{tuple(scale.shape)}"
        )
    given = scale.to(torch.float32).reshape(())
    global_scale = given if layout == "modelopt" else given.reciprocal()
    if not 0 < float(global_scale) < float("inf"):
        got = f"{PARTS[layout][2]}={float(given)}"
        raise ValueError(f"{name}: expected a global scale above 0 that is finite, got {got}")
    return NVFP4Weight(codes, scales.to(torch.float8_e4m3fn), global_scale, 2 * codes.shape[1])


def fp8_from(name: str, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """One layer's codes [N, K] and scales fp32 [N] out of a checkpoint's tensors; one scale for all is one per row."""
    codes, scales = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    rows = codes.shape[0] if codes.dim() == 2 else None
    shapes = rows is not None and tuple(scales.shape) in ((), (1,), (1, 1), (rows,), (rows, 1))
    if codes.dtype != torch.float8_e4m3fn or not shapes or scales.dtype not in WIDE:
        half = " (or a weight_scale_2, of NVFP4 in modelopt's layout)" if codes.dtype == torch.uint8 else ""
        raise ValueError(
            f"{name}: expected FP8 with a scale a row or one for all, codes e4m3 [N, K] and scales [N, 1], [N] or [1]"
            f"{half}, got {codes.dtype} {tuple(codes.shape)} and {scales.dtype} {tuple(scales.shape)}"
        )
    wide = scales.to(torch.float32)
    if not bool(wide.isfinite().all()):
        raise ValueError(f"{name}: its weight_scale has values that are not finite; save the checkpoint again")
    return codes, wide.reshape(-1).expand(codes.shape[0]).contiguous()


def input_scale_from(name: str, scale: Tensor) -> Tensor:
    """The static scale of a layer's inputs, fp32 []."""
    value = scale.to(torch.float32).reshape(-1) if scale.dtype in WIDE else torch.empty(0)
    if value.numel() != 1 or not 0 < float(value) < float("inf"):
        raise ValueError(
            f"{name}: expected one finite number above 0 as input_scale, got {scale.dtype} {tuple(scale.shape)}"
            f"{f', {float(value)}' if value.numel() == 1 else ''}"
        )
    return value.reshape(())


def read_layer(name: str, tensors: Mapping[str, Tensor], layout: str) -> NVFP4Weight | tuple[Tensor, Tensor]:
    """One layer's weight, in a layout of ``packed_layers``."""
    return fp8_from(name, tensors) if layout == "fp8" else nvfp4_from(name, tensors, layout)


# Of FP8 inputs in compressed-tensors' words, by whether their scales are static.
FP8_INPUTS = {
    True: {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False},
    False: {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
}


def quantization_config(
    layout: str, format: str, ignore: Sequence[str], inputs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What goes into ``config.json`` under "quantization_config"; ``inputs``: one of ``FP8_INPUTS``."""
    if layout == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "W4A16_NVFP4",
            "group_size": 16,
            "kv_cache_scheme": None,
            "ignore": list(ignore),
            "producer": {"name": "fp8_compile"},
        }
    weights: dict[str, Any] = {"type": "float", "symmetric": True, "dynamic": False}
    if format == "nvfp4":
        weights |= {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
        weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
    else:
        weights |= {"num_bits": 8, "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    stored = "nvfp4-pack-quantized" if format == "nvfp4" else "float-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": stored}},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def modelopt_file(ignore: Sequence[str]) -> dict[str, Any]:
    """``hf_quant_config.json``, by which servers know modelopt's checkpoints."""
    return {
        "producer": {"name": "fp8_compile"},
        "quantization": {
            "quant_algo": "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": list(ignore),
        },
    }


def _check_storable(name: str, weight: NVFP4Weight) -> None:
    if weight.columns % 16 or weight.block_size != 16:
        raise ValueError(
            f"{name}: checkpoints hold NVFP4 in blocks of 16 with K a multiple of 16, got K={weight.columns} in blocks "
            f"of {weight.block_size}; exclude the layer from packing, or pack with block_size=16"
        )
