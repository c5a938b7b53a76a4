"""The FP8 gemm in plain PyTorch: the reference, and what a CPU runs without a C++ compiler.

    y[m, n] = sum_k left[m, k] * right[k, n] * scale_left[m, k] * scale_right[k, n] + bias[n]

left: [M, K] fp8, right: [K, N] fp8; scale_left: [1, 1], [M, 1], [M, K/128] or [M/128, K/128] fp32,
scale_right: [1, 1], [1, N], [K/128, N] or [K/128, N/128] fp32 -> y: [M, N] fp32/bf16/fp16.

Scales that do not vary along K are taken out of the sum, where the products are still exact.
"""

from __future__ import annotations

import torch

from .quantize import spread

SCALE_TILE = 128


def scaled_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    scale_left: torch.Tensor,
    scale_right: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The formula above."""
    a, b = operands(left, right, scale_left, scale_right)
    return epilogue(a @ b, scale_left, scale_right, bias, out_dtype)


def operands(
    left: torch.Tensor, right: torch.Tensor, scale_left: torch.Tensor, scale_right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both sides in FP32: as they are, or with their scales where these belong to tiles."""
    a, b = left.to(torch.float32), right.to(torch.float32)
    if has_tiles(a.shape[0], b.shape[1], scale_left, scale_right):
        a = a * spread(scale_left, a.shape, (_block(a.shape[0], scale_left.shape[0]), SCALE_TILE))
        b = b * spread(scale_right, b.shape, (SCALE_TILE, _block(b.shape[1], scale_right.shape[1])))
    return a, b


def epilogue(
    product: torch.Tensor,
    scale_left: torch.Tensor,
    scale_right: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What follows the product: the scales that do not vary along K, the bias, the cast."""
    if not has_tiles(product.shape[0], product.shape[1], scale_left, scale_right):
        product = product * (scale_left * scale_right)
    if bias is not None:
        product = product + bias
    return product.to(out_dtype)


def has_tiles(m: int, n: int, scale_left: torch.Tensor, scale_right: torch.Tensor) -> bool:
    """True if some scale belongs to a 1x128 or 128x128 tile rather than to a whole tensor, row or column."""
    along_k = not (_same(scale_left.shape[1], 1) and _same(scale_right.shape[0], 1))
    lines = all(
        _same(size, 1) or _same(size, whole) for size, whole in ((scale_left.shape[0], m), (scale_right.shape[1], n))
    )
    return along_k or not lines


def _block(size: int | torch.SymInt, scales: int | torch.SymInt) -> int:
    return 1 if _same(size, scales) else SCALE_TILE


def _same(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # SymPy takes a second to import

    return statically_known_true(size == other)
