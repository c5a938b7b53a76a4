"""The MXFP8 gemm of ragged groups, the experts of a layer.

    rows       y[t, n]    = sum_k left[t, k] * right[g, k, n]                       t in group g
    contract   y[g, m, n] = sum_t left[m, t] * right[t, n]                          over t in group g

of operands that are dequantized as ``mxfp8.py`` says, along the contraction. Group g is ``ends[g - 1] <= t < ends[g]``;
rows after the last group are zeros.

mx_grouped_mm: scales as ``quantize_mx`` gives them. Rows: left [T, K], scale_left [T, K/32]; right [G, K, N],
scale_right [G, K/32, N/32]. Contract: left [M, T], scale_left [M, T/32]; right [T, N], scale_right [T/32, N]; every end
is a multiple of 32. It is what a CPU runs: one gemm per group.

swizzled_mx_grouped_mm: what a GPU of compute capability 10.x runs, ``torch._scaled_grouped_mm``. K is contiguous on
both sides, and so is each matrix of a stack; the scales are flat bytes in the order of ``mx_swizzled.py``, those of
each group or matrix by themselves, one after the other; every end is a multiple of 128. y is bf16, and rows after the
last group are not written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .define_op import define
from .mx_swizzled import COLUMNS, PIECE, ROWS, unswizzle
from .mxfp8 import SIZE, mx_mm_op
from .operands import ANY, INDICES, check, check_value
from .quantize import HIGH_PRECISION
from .scaled_grouped_mm import bounds, new_result

MULTIPLE = 128  # of the ends of groups on a GPU: of the rows, or four scales, that the hardware reads at once


def mx_grouped_mm(
    left: Tensor, right: Tensor, ends: Tensor, scale_left: Tensor, scale_right: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Both formulas; which one, the dimensions of ``right`` say."""
    out = new_result(left, right, ends, out_dtype).zero_()
    by_rows = right.dim() == 3
    for group, (start, end) in enumerate(bounds(ends, tokens=left.shape[0 if by_rows else 1], op="mx_grouped_mm")):
        some = slice(start, end)
        if by_rows:
            scales = scale_left[some], scale_right[group]
            out[some] = mx_mm_op(left[some], right[group], *scales, None, out_dtype)
            continue
        if start % SIZE or end % SIZE:
            raise RuntimeError(
                f"fp8_compile::mx_grouped_mm: ends: expected multiples of {SIZE}, the blocks that share a scale, where "
                f"the contraction goes over groups; got {ends.tolist()}"
            )
        blocks = slice(start // SIZE, end // SIZE)
        scales = scale_left[:, blocks].contiguous(), scale_right[blocks]
        out[group] = mx_mm_op(left[:, some], right[some], *scales, None, out_dtype)
    return out


def swizzled_mx_grouped_mm(
    left: Tensor, right: Tensor, ends: Tensor, scale_left: Tensor, scale_right: Tensor
) -> Tensor:
    """The same of operands as a GPU reads them, in plain PyTorch."""
    if right.dim() == 3:
        groups, k, n = right.shape
        rows = unswizzle(scale_left, left.shape[0], k // SIZE)
        stack = torch.stack([unswizzle(one, n, k // SIZE).t() for one in scale_right.view(groups, -1)])
        # One scale per column, where mx_grouped_mm has one for each 32 of them.
        return mx_grouped_mm(left, right, ends, rows.contiguous(), stack, torch.bfloat16)
    sides = []
    for flat, outer in ((scale_left, left.shape[0]), (scale_right, right.shape[1])):
        parts, padded = [], -(-outer // ROWS) * ROWS
        for start, end in bounds(ends, tokens=left.shape[1]):
            part = flat[padded * start // SIZE : padded * end // SIZE]
            parts.append(unswizzle(part, outer, (end - start) // SIZE))
        rest = flat.new_zeros(outer, left.shape[1] // SIZE - sum(part.shape[1] for part in parts))
        sides.append(torch.cat([*parts, rest], 1))
    return mx_grouped_mm(left, right, ends, sides[0], sides[1].t().contiguous(), torch.bfloat16)


def scales_by_group(flat: Tensor, ends: Tensor, outer: int | torch.SymInt) -> Tensor:
    """Scales of [outer, T/32] that were put into the hardware's order as those of one matrix, in the order of those of
    one matrix per group: pieces of 128x4 scales change places. Ends are multiples of 128."""
    down = (outer + ROWS - 1) // ROWS
    pieces = flat.view(-1, PIECE)
    across = pieces.shape[0] // down
    ends = ends // (SIZE * COLUMNS)
    piece = torch.arange(pieces.shape[0], device=flat.device, dtype=torch.int32)
    group = torch.bucketize(piece, ends * down, out_int32=True, right=True).clamp_max(ends.shape[0] - 1)
    start = torch.nn.functional.pad(ends[:-1], (1, 0))[group]
    width, place = ends[group] - start, piece - start * down
    # What is after the last group belongs to none and stays where it is read from.
    found = torch.where(place < width * down, place // width * across + start + place % width, piece)
    return pieces[found].view(-1)


def _checked(
    left: Tensor, right: Tensor, ends: Tensor, scale_left: Tensor, scale_right: Tensor, out_dtype: torch.dtype
) -> Tensor:
    name, e4m3, bytes_ = "mx_grouped_mm", (torch.float8_e4m3fn,), (torch.uint8,)
    check(name, "left", left, e4m3, (ANY, ANY))
    check(name, "ends", ends, INDICES, (ANY,))
    inner = left.shape[1]
    stack = () if right.dim() == 2 else (ends.shape[0],)
    check(name, "right", right, e4m3, (*stack, inner, ANY))
    n, blocks = right.shape[-1], -(-inner // SIZE)
    check(name, "scale_left", scale_left, bytes_, (left.shape[0], blocks))
    check(name, "scale_right", scale_right, bytes_, (*stack, blocks, n), (*stack, blocks, -(-n // SIZE)))
    check_value(name, "out_dtype", out_dtype, HIGH_PRECISION)
    return mx_grouped_mm(left, right, ends, scale_left, scale_right, out_dtype)


mx_grouped_mm_op = define(
    "mx_grouped_mm(Tensor left, Tensor right, Tensor ends, Tensor scale_left, Tensor scale_right, ScalarType out_dtype)"
    " -> Tensor",
    _checked,
    lambda left, right, ends, scale_left, scale_right, out_dtype: new_result(left, right, ends, out_dtype),
)
swizzled_mx_grouped_mm_op = define(
    "swizzled_mx_grouped_mm(Tensor left, Tensor right, Tensor ends, Tensor scale_left, Tensor scale_right) -> Tensor",
    swizzled_mx_grouped_mm,
    lambda left, right, ends, scale_left, scale_right: new_result(left, right, ends, torch.bfloat16),
    cuda="fp8_compile.kernels.gpu.mx_grouped_mm:multiply",
)
