"""Products with NVFP4 weights on the CPU, straight from their packed form.

    w = e2m1 * e4m3_block_scale * global_scale,    blocks of 16 along K

codes: uint8 [N, K/2], even k in the low nibble, bit 3 the sign; block_scales: e4m3 [N, K/16]; K a multiple of 16.

The kernels read *interleaved* weights, whose shapes, dtypes and bytes are the same: rows go in groups of 16 (the last
group has the N % 16 that are left), and a group holds, 8 elements of K after 8 elements, 4 bytes of codes of each of
its rows; its block scales, block after block, a byte of each row. So a vector register loads the same 8 k of 16 rows,
a lane is a row, and nothing is ever added across lanes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels.nvfp4 import ops
from fp8_compile.kernels.operands import ANY, FLOATS, ONE, check, check_value

from .arguments import DTYPES

BLOCK = 16  # elements of K that share a block scale
GROUP = 16  # rows that are interleaved
_WORD = 4  # bytes of codes that a lane takes at once


def product(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    activations: str | None,
    layout: str = ops.STANDARD,
) -> Tensor:
    """``nvfp4_mm`` on a CPU without C++. There are kernels for interleaved weights, and none for FP64."""
    check_value("nvfp4_mm", "layout", layout, ops.LAYOUTS)
    if layout != ops.INTERLEAVED or x.dtype == torch.float64:
        return ops.reference(x, codes, block_scales, global_scale, bias, activations, layout)
    _check_operands(x, codes, block_scales, global_scale, bias, activations)
    return reference(x, codes, block_scales, global_scale, bias, activations).to(x.dtype)


def gradient(
    grad: Tensor, codes: Tensor, block_scales: Tensor, global_scale: Tensor, columns: int, layout: str
) -> Tensor:
    """``nvfp4_mm_grad`` on a CPU without C++."""
    op = "nvfp4_mm_grad"
    check_value(op, "layout", layout, ops.LAYOUTS)
    if layout == ops.INTERLEAVED and grad.dtype != torch.float64:
        check(op, "grad", grad, DTYPES, (ANY, ANY))
        check_grad_weight(op, grad, codes, block_scales, columns, (grad.shape[1], ANY))
        check(op, "global_scale", global_scale, FLOATS, *ONE)
    return ops.reference_grad(grad, codes, block_scales, global_scale, columns, layout)


def matmul(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    global_scale: Tensor | float,
    bias: Tensor | None = None,
    activations: str | None = None,
) -> Tensor:
    """y = x w^T + bias: [M, N] in x's dtype, weights interleaved.

    x: [M, K] fp32/bf16/fp16, where the weight's K may be x's padded to a multiple of 16; global_scale: one fp32.
    ``activations=None``: products are exact and summed in FP32 (bf16 below 2**-126 may count as zero);
    ``"int8"``: x goes through ``quantize_activations`` first, and the sums of a block are exact.
    """
    scale = global_scale if isinstance(global_scale, Tensor) else torch.tensor(global_scale)
    y: Tensor = ops.mm_op(x, codes, block_scales, scale, bias, activations, ops.INTERLEAVED)
    return y


def reference(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    global_scale: Tensor | float,
    bias: Tensor | None = None,
    activations: str | None = None,
) -> Tensor:
    """``matmul`` in plain PyTorch, in FP64 and not rounded to x's dtype."""
    weight = dequantize(*deinterleave(codes, block_scales), global_scale)
    x = torch.nn.functional.pad(x.double(), (0, weight.shape[1] - x.shape[1]))
    if activations == "int8":
        q, scales = quantize_activations(x.float())
        x = (q.double().unflatten(1, (-1, BLOCK)) * scales.double().unsqueeze(-1)).flatten(1)
    y = x @ weight.t()
    return y if bias is None else y + bias.double()


def dequantize(codes: Tensor, block_scales: Tensor, global_scale: Tensor | float) -> Tensor:
    """Plain codes and scales -> w: [N, K] in FP64."""
    values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float64)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    signed = torch.cat((values, -values))[nibbles].unflatten(1, (-1, BLOCK))
    return (signed * block_scales.double().unsqueeze(-1)).flatten(1) * float(global_scale)


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 by blocks of 16 along K, in FP32.

        scale = amax(|x|) / 127,    q = round(x * (1 / scale)) to nearest even,    x ~ q * scale

    x: [M, K] -> q: int8 [M, K], scales: fp32 [M, K/16]. Where the scale is below 2**-126 q is 0; a block with Inf or
    NaN has q 0 and scale NaN, so that every product with it is NaN.
    """
    blocks = x.float().unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    scales = amax / 127.0
    inverse = torch.where(scales >= 2.0**-126, 1.0 / scales, 0.0)
    q = (blocks * inverse.unsqueeze(-1)).round()
    finite = amax.isfinite()
    q = torch.where(finite.unsqueeze(-1), q, 0.0).to(torch.int8)
    return q.flatten(1), torch.where(finite, scales, torch.nan)


def interleave(codes: Tensor, block_scales: Tensor) -> tuple[Tensor, Tensor]:
    """Plain codes and block scales in the order the kernels read; contiguous copies of the same shapes and dtypes."""
    _check_weight(codes, block_scales)
    return _interleaved(codes, _WORD), _interleaved(block_scales, 1)


def deinterleave(codes: Tensor, block_scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of ``interleave``."""
    _check_weight(codes, block_scales)
    return _deinterleaved(codes, _WORD), _deinterleaved(block_scales, 1)


def _interleaved(x: Tensor, word: int) -> Tensor:
    """[rows, words] -> [words, rows] in each group of rows, words of so many bytes."""
    source = x.contiguous().view(torch.uint8)
    out = torch.empty_like(source)
    for rows, groups, size in _groups(source):
        words = source[rows].view(groups, size, -1, word).transpose(1, 2)
        out[rows].view(groups, -1, size, word).copy_(words)
    return out.view(x.dtype)


def _deinterleaved(x: Tensor, word: int) -> Tensor:
    source = x.contiguous().view(torch.uint8)
    out = torch.empty_like(source)
    for rows, groups, size in _groups(source):
        words = source[rows].view(groups, -1, size, word).transpose(1, 2)
        out[rows].view(groups, size, -1, word).copy_(words)
    return out.view(x.dtype)


def _groups(x: Tensor) -> list[tuple[slice, int, int]]:
    """(rows, number of groups in them, rows of a group): whole groups, then what is left."""
    whole, left = divmod(x.shape[0], GROUP)
    parts = [(slice(0, whole * GROUP), whole, GROUP), (slice(whole * GROUP, None), 1, left)]
    return [(rows, groups, size) for rows, groups, size in parts if groups and size and x.shape[1]]


def _check_operands(
    x: Tensor,
    codes: Tensor,
    block_scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    activations: str | None,
) -> None:
    check("nvfp4_mm", "x", x, DTYPES, (ANY, ANY))
    check_weight("nvfp4_mm", x, codes, block_scales, (ANY, ANY))
    check("nvfp4_mm", "global_scale", global_scale, FLOATS, *ONE)
    if bias is not None:
        check("nvfp4_mm", "bias", bias, DTYPES, codes.shape[:1], contiguous=True)
    if activations not in (None, "int8"):
        raise RuntimeError(
            "fp8_compile::nvfp4_mm: activations: expected None (exact) or 'int8' for weights that are interleaved, got "
            f"activations={activations!r}"
        )


def check_weight(op: str, x: Tensor, codes: Tensor, block_scales: Tensor, dims: tuple[int, ...]) -> None:
    """Raise an error unless x [M, K] can be multiplied by the interleaved weight, or by a stack of them."""
    check(op, "codes", codes, (torch.uint8,), dims, contiguous=True)
    shape = codes.shape
    if shape[-1] % 8 or not 0 <= 2 * shape[-1] - x.shape[1] < BLOCK:
        raise RuntimeError(
            f"fp8_compile::{op}: codes: x [M, K] times an NVFP4 weight of codes [..., K/2]: expected one K, in the "
            f"weight padded to a multiple of {BLOCK}, got x {tuple(x.shape)} and codes {tuple(shape)}"
        )
    check(op, "block_scales", block_scales, (torch.float8_e4m3fn,), (*shape[:-1], shape[-1] // 8), contiguous=True)


def check_grad_weight(
    op: str, grad: Tensor, codes: Tensor, block_scales: Tensor, columns: int, dims: tuple[int, ...]
) -> None:
    """Raise an error unless grad [M, N] can be multiplied by the interleaved weight [N, columns], or a stack."""
    check(op, "codes", codes, (torch.uint8,), dims, contiguous=True)
    shape = codes.shape
    if shape[-1] % 8 or not 0 <= 2 * shape[-1] - columns < BLOCK:
        raise RuntimeError(
            f"fp8_compile::{op}: columns: expected the K of a weight whose codes are [..., K/2], K padded to a multiple"
            f" of {BLOCK}: codes are {tuple(shape)}, got {columns}"
        )
    check(op, "block_scales", block_scales, (torch.float8_e4m3fn,), (*shape[:-1], shape[-1] // 8), contiguous=True)


def _check_weight(codes: Tensor, block_scales: Tensor) -> None:
    if codes.dtype != torch.uint8 or block_scales.dtype != torch.float8_e4m3fn:
        raise TypeError(
            "an NVFP4 weight has codes in uint8 and block_scales in float8_e4m3fn, "
            f"got {codes.dtype} and {block_scales.dtype}"
        )
    if codes.dim() != 2 or block_scales.shape != (codes.shape[0], codes.shape[1] * 2 // BLOCK) or codes.shape[1] % 8:
        raise ValueError(
            f"an NVFP4 weight has codes [N, K/2] and block_scales [N, K/{BLOCK}], K a multiple of {BLOCK}, "
            f"got {tuple(codes.shape)} and {tuple(block_scales.shape)}; pad K with zeros"
        )
