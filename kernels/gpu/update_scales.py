"""Delayed scaling's update of all slots of a format in one launch, bit-equal to ``delayed_scaling.update``.

    amax enters the history in place of the oldest one           if it is finite
    m           = max(history)                                   or the newest, or the 99th percentile
    quant_scale = F / (m * 2**margin), capped to be finite       if m > 0 and this is an ``interval``-th pass
    dequant_scale = 1 / quant_scale
    amaxes      = -1                                             nothing recorded, for the pass that begins
    known       = scales                                         of the pass that begins, for whoever reads them

State of C slots, in place: amaxes [C] fp32, -1 where the slot was not part of the pass; history [C, L] fp32, a ring;
scales [2, C] fp32, (quant, dequant); counts [2, C] int32, (passes, amaxes that entered). known [2, C] fp32: a copy of
the scales that later updates leave alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..delayed_scaling import update as reference
from .tile import reciprocal

__all__ = ["ALGORITHMS", "reference", "update_scales", "update_scales_kernel"]

ALGORITHMS = {"max": 0, "most_recent": 1, "p99": 2}
BLOCK_ELEMENTS, NUM_WARPS = 1024, 4  # of the history, a program


@triton.jit
def update_scales_kernel(
    amaxes_ptr,
    history_ptr,
    scales_ptr,
    counts_ptr,
    known_ptr,
    slots,
    LARGEST: tl.constexpr,
    SCALE_BY_MARGIN: tl.constexpr,  # 2.0**margin
    LENGTH: tl.constexpr,
    LENGTH_POW2: tl.constexpr,  # the next power of two
    ALGORITHM: tl.constexpr,  # a value of ALGORITHMS
    INTERVAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK slots a program."""
    MOST: tl.constexpr = 3.4028234663852886e38  # the largest FP32
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < slots
    amax = tl.load(amaxes_ptr + slot, mask=inside, other=-1.0)
    quant_scale = tl.load(scales_ptr + slot, mask=inside, other=1.0)
    dequant_scale = tl.load(scales_ptr + slots + slot, mask=inside, other=1.0)
    passes = tl.load(counts_ptr + slot, mask=inside, other=0)
    entered = tl.load(counts_ptr + slots + slot, mask=inside, other=0)
    i = tl.arange(0, LENGTH_POW2)
    row = slot.to(tl.int64) * LENGTH
    # Beyond the history: -1, below everything that enters.
    kept = inside[:, None] & (i < LENGTH)[None, :]
    history = tl.load(history_ptr + row[:, None] + i[None, :], mask=kept, other=-1.0)
    # What several warps need each of them reads for itself, and a warp that is late would read what another one has
    # written by then (triton#1615): all have read before any writes.
    tl.debug_barrier()
    tl.store(amaxes_ptr + slot, tl.full([BLOCK], -1.0, tl.float32), mask=inside)

    present = amax != -1.0  # a NaN is present, and does not enter
    enters = present & (amax >= 0.0) & (amax < float("inf"))
    newest = entered % LENGTH
    history = tl.where((i[None, :] == newest[:, None]) & enters[:, None], amax[:, None], history)
    tl.store(history_ptr + row + newest, amax, mask=inside & enters)
    passes += present.to(tl.int32)
    entered += enters.to(tl.int32)
    tl.store(counts_ptr + slot, passes, mask=inside)
    tl.store(counts_ptr + slots + slot, entered, mask=inside)

    if ALGORITHM == 0:
        m = tl.max(history, axis=1)
    elif ALGORITHM == 1:
        m = _at(history, i, (entered + (LENGTH - 1)) % LENGTH)
    else:
        falling = tl.sort(history, dim=1, descending=True)
        known = tl.minimum(tl.maximum(entered, 1), LENGTH)
        zero = tl.minimum(entered, 0)  # for all that the compiler knows, it is not
        from_top = _rounded((known - 1).to(tl.float32) * 0.010000000000000009, zero)  # 1 - 0.99
        above = tl.floor(from_top)
        at = above.to(tl.int32)
        high = _at(falling, i, at)
        low = _at(falling, i, tl.minimum(at + 1, LENGTH - 1))
        m = high - _rounded((high - low) * (from_top - above), zero)

    reach = tl.minimum(m * SCALE_BY_MARGIN, MOST)
    fresh = tl.minimum(reciprocal(reach) * LARGEST, MOST)
    due = present & ((passes % INTERVAL == 0) | (quant_scale == 0.0))
    quant_scale = tl.where(due & (m > 0.0), fresh, quant_scale)
    dequant_scale = tl.where(quant_scale > 0.0, reciprocal(quant_scale), dequant_scale)
    tl.store(scales_ptr + slot, quant_scale, mask=inside)
    tl.store(scales_ptr + slots + slot, dequant_scale, mask=inside)
    tl.store(known_ptr + slot, quant_scale, mask=inside)
    tl.store(known_ptr + slots + slot, dequant_scale, mask=inside)


@triton.jit
def _at(values, i, index):
    """values[:, index], one index a row."""
    return tl.sum(tl.where(i[None, :] == index[:, None], values, 0.0), axis=1)


@triton.jit
def _rounded(product, zero):
    """A product rounded by itself.

    The compiler would contract it with the subtraction it goes into: one rounding instead of the reference's two. An
    integer operation in between keeps it from that on every target, if it can't be seen to change nothing.
    """
    return (product.to(tl.int32, bitcast=True) | zero).to(tl.float32, bitcast=True)


def update_scales(
    history: Tensor,
    scales: Tensor,
    counts: Tensor,
    amaxes: Tensor,
    largest: float,
    margin: int = 0,
    algorithm: str = "max",
    interval: int = 1,
) -> Tensor:
    """The update above, in place; ``known`` is returned."""
    known = torch.empty_like(scales)
    grid, arguments = launch_arguments(*history.shape, largest, margin, algorithm, interval)
    update_scales_kernel[grid](amaxes, history, scales, counts, known, **arguments, num_warps=NUM_WARPS)
    return known


def launch_arguments(
    slots: int, length: int, largest: float, margin: int, algorithm: str, interval: int
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and scalar arguments for a state of ``slots`` histories of ``length``."""
    length_pow2 = triton.next_power_of_2(length)
    block = max(1, BLOCK_ELEMENTS // length_pow2)
    arguments = {
        "slots": slots,
        "LARGEST": largest,
        "SCALE_BY_MARGIN": 2.0**margin,
        "LENGTH": length,
        "LENGTH_POW2": length_pow2,
        "ALGORITHM": ALGORITHMS[algorithm],
        "INTERVAL": interval,
        "BLOCK": block,
    }
    return (max(1, triton.cdiv(slots, block)), 1, 1), arguments
