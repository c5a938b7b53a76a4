"""Products with NVFP4 weights as operations of a graph.

    nvfp4_dequantize(codes, block_scales, global_scale, columns, dtype, layout)        -> w [N, K]
    nvfp4_round_activations(x, activations)                                            -> x as the product will see it
    nvfp4_mm(x, codes, block_scales, global_scale, bias, activations, layout)          -> x w^T + bias, [M, N]
    nvfp4_mm_grad(grad, codes, block_scales, global_scale, columns, layout)            -> grad w, [M, K]: x's gradient

A packed layer does ``linear(nvfp4_round_activations(x), nvfp4_dequantize(...))``; the pass ``MultiplyPacked`` makes
one ``nvfp4_mm`` of it. They are opaque to Inductor, so that no pass folds the weight back to what it was packed from.

layout: "standard", as in checkpoints; "interleaved", as the CPU's kernels read (``kernels/cpu/nvfp4.py``); "swizzled",
block scales as the tensor cores of sm_100 read (``kernels/gpu/nvfp4_scales.py``).
activations: None keeps x as it is; "int8" and "nvfp4" round it by blocks of 16 along K.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from fp8_compile.kernels.define_op import define
from fp8_compile.kernels.operands import check_value

from . import rtn
from .weight import NEAREST_RANGE, dequantize, global_scale_of

STANDARD, INTERLEAVED, SWIZZLED = LAYOUTS = ("standard", "interleaved", "swizzled")
ACTIVATIONS = (None, "int8", "nvfp4")


def to_standard(codes: Tensor, block_scales: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Codes and block scales in the standard layout; of a stack of matrices, each as by itself."""
    if codes.dim() == 3 and layout != STANDARD:
        return _each(to_standard, codes, block_scales, layout)
    if layout == INTERLEAVED:
        from fp8_compile.kernels.cpu import nvfp4

        return nvfp4.deinterleave(codes, block_scales)
    if layout == SWIZZLED:
        from fp8_compile.kernels.gpu import nvfp4_scales

        return codes, nvfp4_scales.unswizzle(block_scales, codes.shape[0], codes.shape[1] // 8)
    return codes, block_scales


def from_standard(codes: Tensor, block_scales: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The inverse of ``to_standard``."""
    if codes.dim() == 3 and layout != STANDARD:
        return _each(from_standard, codes, block_scales, layout)
    if layout == INTERLEAVED:
        from fp8_compile.kernels.cpu import nvfp4

        return nvfp4.interleave(codes, block_scales)
    if layout == SWIZZLED:
        from fp8_compile.kernels.gpu import nvfp4_scales

        return codes, nvfp4_scales.swizzle(block_scales)
    return codes, block_scales


def _each(
    change: Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor]], codes: Tensor, block_scales: Tensor, layout: str
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(codes), torch.empty_like(block_scales)
    for expert in range(codes.shape[0]):
        for whole, part in zip(out, change(codes[expert], block_scales[expert], layout)):
            whole[expert] = part
    return out


def layout_for(device: torch.device, block_size: int, activations: str | None) -> str:
    """The layout that the device's kernels read."""
    if block_size != 16:
        return STANDARD
    if device.type == "cpu" and activations != "nvfp4":
        return INTERLEAVED
    if device.type == "cuda" and activations == "nvfp4" and not torch.version.hip:
        return SWIZZLED if torch.cuda.get_device_capability(device) >= (10, 0) else STANDARD
    return STANDARD


def _dequantize(
    codes: Tensor, block_scales: Tensor, global_scale: Tensor, columns: int, dtype: torch.dtype, layout: str
) -> Tensor:
    return dequantize(*to_standard(codes, block_scales, layout), global_scale, columns, dtype)


def round_activations(x: Tensor, activations: str) -> Tensor:
    """x rounded by blocks of 16 along its last dimension, in its own dtype."""
    rows = torch.nn.functional.pad(x.reshape(-1, x.shape[-1]), (0, -x.shape[-1] % 16))
    if activations == "int8":
        from fp8_compile.kernels.cpu import nvfp4

        q, scales = nvfp4.quantize_activations(rows)
        rounded = q.to(torch.float32).unflatten(1, (-1, 16)).mul_(scales.unsqueeze(-1)).flatten(1)
    else:
        global_scale = activation_scale(rows)
        rounded = dequantize(*rtn.quantize(rows, global_scale), global_scale, rows.shape[1])
    return rounded[:, : x.shape[-1]].to(x.dtype).reshape(x.shape)


def activation_scale(x: Tensor) -> Tensor:
    """The global scale of activations in NVFP4, from the tensor itself; NaN where the tensor has Inf or NaN."""
    amax = x.abs().amax().to(torch.float32) if x.numel() else x.new_zeros((), dtype=torch.float32)
    return global_scale_of(amax, NEAREST_RANGE) + 0.0 * amax


def reference(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None = None,
    activations: str | None = None,
    layout: str = STANDARD,
) -> Tensor:
    """``nvfp4_mm`` in plain PyTorch."""
    check_value("nvfp4_mm", "layout", layout, LAYOUTS)
    weight = _dequantize(codes, block_scales, global_scale, x.shape[1], x.dtype, layout)
    x = x if activations is None else round_activations(x, activations)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def reference_grad(
    grad: Tensor, codes: Tensor, block_scales: Tensor, global_scale: Tensor, columns: int, layout: str
) -> Tensor:
    """``nvfp4_mm_grad`` in plain PyTorch."""
    check_value("nvfp4_mm_grad", "layout", layout, LAYOUTS)
    return grad @ _dequantize(codes, block_scales, global_scale, columns, grad.dtype, layout)


dequantize_op = define(
    "nvfp4_dequantize(Tensor codes, Tensor block_scales, Tensor global_scale, int columns, ScalarType dtype,"
    " str layout) -> Tensor",
    _dequantize,
    lambda codes, block_scales, global_scale, columns, dtype, layout: codes.new_empty(
        (codes.shape[0], columns), dtype=dtype
    ),
)
round_activations_op = define(
    "nvfp4_round_activations(Tensor x, str activations) -> Tensor",
    round_activations,
    lambda x, activations: torch.empty_like(x, memory_format=torch.contiguous_format),
    gradient=lambda ctx, grad: (grad, None),  # as if the rounding were not there
)
mm_op = define(
    "nvfp4_mm(Tensor x, Tensor codes, Tensor block_scales, Tensor global_scale, Tensor? bias, str? activations,"
    ' str layout="standard") -> Tensor',
    reference,
    lambda x, codes, block_scales, global_scale, bias, activations, layout="standard": x.new_empty(
        (x.shape[0], codes.shape[0])
    ),
    cpu="fp8_compile.kernels.cpu.nvfp4:product",
    cuda="fp8_compile.kernels.gpu.nvfp4_product:product",
)
mm_grad_op = define(
    "nvfp4_mm_grad(Tensor grad, Tensor codes, Tensor block_scales, Tensor global_scale, int columns, str layout)"
    " -> Tensor",
    reference_grad,
    lambda grad, codes, block_scales, global_scale, columns, layout: grad.new_empty((grad.shape[0], columns)),
    cpu="fp8_compile.kernels.cpu.nvfp4:gradient",
    cuda="fp8_compile.kernels.gpu.nvfp4_product:gradient",
)
