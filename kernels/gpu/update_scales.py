"""Delayed scaling's update of all slots of a format in one launch, bit-equal to ``delayed_scaling.update``.

    saturated   : amax * quant_scale > F, by more than rounding takes back       counted
    room        = sum of ceil(log2(amax * quant_scale / F)) over slots that were saturated and have not been part of
                  two runs since, limited by the format; over all graphs of a model, which share one tensor for it
    amax enters the history in place of the oldest one           if it is finite
    m           = max(history)                                   or the newest, or the 99th percentile
    quant_scale = F / (m * 2**(margin + room)), capped to be finite      if m > 0 and this is an ``interval``-th run
    dequant_scale = 1 / quant_scale
    amaxes      = -1                                             nothing recorded, for the run that begins
    known       = scales                                         of the run that begins, for whoever reads them

State of C slots, in place: amaxes [C] fp32, -1 where the slot was not part of the run; history [C, L] fp32, a ring;
scales [2, C] fp32, (quant, dequant); counts [10, C] and room [1] int32, see ``delayed_scaling.py``. known [2, C] fp32:
a copy of the scales that later updates leave alone, 0 where the tensor's own amax is to be used.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_compile.kernels.delayed_scaling import limits_of, room_for
from fp8_compile.kernels.delayed_scaling import update as reference

from .launch import Launch
from .tile import reciprocal

__all__ = ["ALGORITHMS", "reference", "update_in_place", "update_scales", "update_scales_kernel"]

ALGORITHMS = {"max": 0, "most_recent": 1, "p99": 2, "frozen": 3}
BLOCK_ELEMENTS, NUM_WARPS = 1024, 4  # of the history at a time
ALIGNMENT = 16  # bytes; Triton compiles one kernel for addresses that are a multiple, and another one for others


@triton.jit
def update_scales_kernel(
    amaxes_ptr,
    history_ptr,
    scales_ptr,
    counts_ptr,
    room_ptr,
    known_ptr,
    slots,
    LARGEST: tl.constexpr,
    SATURATED_ABOVE: tl.constexpr,
    SMALL_BELOW: tl.constexpr,
    MOST_ROOM: tl.constexpr,
    LENGTH: tl.constexpr,
    LENGTH_POW2: tl.constexpr,  # the next power of two
    ALGORITHM: tl.constexpr,  # a value of ALGORITHMS
    INTERVAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for all slots, BLOCK of them at a time: ``room`` is the sum over all of them."""
    MOST: tl.constexpr = 3.4028234663852886e38  # the largest FP32
    needed = tl.load(room_ptr)  # of slots elsewhere, once the old need of these is taken off
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        inside = slot < slots
        amax, reached, known = _reached(amaxes_ptr, scales_ptr, counts_ptr, slot, inside, slots)
        over, hold, _ = _room(amax, reached, known, counts_ptr, slot, inside, slots, LARGEST, SATURATED_ABOVE)
        needed += tl.sum(tl.where(hold > 0, over, 0) - _needed_before(counts_ptr, slot, inside, slots), axis=0)
    most_room = tl.minimum(tl.maximum(needed, 0), MOST_ROOM)

    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        inside = slot < slots
        amax, reached, known = _reached(amaxes_ptr, scales_ptr, counts_ptr, slot, inside, slots)
        over, hold, flows = _room(amax, reached, known, counts_ptr, slot, inside, slots, LARGEST, SATURATED_ABOVE)
        room = tl.where(flows, most_room, 0)
        quant_scale = tl.load(scales_ptr + slot, mask=inside, other=1.0)
        dequant_scale = tl.load(scales_ptr + slots + slot, mask=inside, other=1.0)
        passes = tl.load(counts_ptr + slot, mask=inside, other=0)
        entered = tl.load(counts_ptr + slots + slot, mask=inside, other=0)
        count_saturated = tl.load(counts_ptr + 2 * slots + slot, mask=inside, other=0)
        count_clipped = tl.load(counts_ptr + 3 * slots + slot, mask=inside, other=0)
        count_small = tl.load(counts_ptr + 4 * slots + slot, mask=inside, other=0)
        margin = tl.load(counts_ptr + 7 * slots + slot, mask=inside, other=0)
        look = tl.load(counts_ptr + 8 * slots + slot, mask=inside, other=0)
        i = tl.arange(0, LENGTH_POW2)
        row = slot.to(tl.int64) * LENGTH
        # Beyond the history: -1, below everything that enters.
        kept = inside[:, None] & (i < LENGTH)[None, :]
        history = tl.load(history_ptr + row[:, None] + i[None, :], mask=kept, other=-1.0)
        # What several warps need each of them reads for itself, and a warp that is late would read what another one
        # has written by then (triton#1615): all have read before any writes.
        tl.debug_barrier()
        tl.store(amaxes_ptr + slot, tl.full([BLOCK], -1.0, tl.float32), mask=inside)

        present = amax != -1.0  # a NaN is present, and does not enter
        enters = present & (amax >= 0.0) & (amax < float("inf"))
        newest = entered % LENGTH
        history = tl.where((i[None, :] == newest[:, None]) & enters[:, None], amax[:, None], history)
        tl.store(history_ptr + row + newest, amax, mask=inside & enters)
        passes += present.to(tl.int32)
        entered += enters.to(tl.int32)
        count_saturated += (known & (reached > SATURATED_ABOVE)).to(tl.int32)
        count_clipped += (known & (reached > LARGEST * 2.0)).to(tl.int32)
        count_small += (known & (amax > 0.0) & (reached < SMALL_BELOW)).to(tl.int32)
        tl.store(counts_ptr + slot, passes, mask=inside)
        tl.store(counts_ptr + slots + slot, entered, mask=inside)
        tl.store(counts_ptr + 2 * slots + slot, count_saturated, mask=inside)
        tl.store(counts_ptr + 3 * slots + slot, count_clipped, mask=inside)
        tl.store(counts_ptr + 4 * slots + slot, count_small, mask=inside)
        tl.store(counts_ptr + 5 * slots + slot, over, mask=inside)
        tl.store(counts_ptr + 6 * slots + slot, hold, mask=inside)

        if ALGORITHM != 3:
            if ALGORITHM == 0:
                m = tl.max(history, axis=1)
            elif ALGORITHM == 1:
                m = _at(history, i, (entered + (LENGTH - 1)) % LENGTH)
            else:
                falling = tl.sort(history, dim=1, descending=True)
                filled = tl.minimum(tl.maximum(entered, 1), LENGTH)
                zero = tl.minimum(entered, 0)  # for all that the compiler knows, it is not
                from_top = _rounded((filled - 1).to(tl.float32) * 0.010000000000000009, zero)  # 1 - 0.99
                above = tl.floor(from_top)
                at = above.to(tl.int32)
                high = _at(falling, i, at)
                low = _at(falling, i, tl.minimum(at + 1, LENGTH - 1))
                m = high - _rounded((high - low) * (from_top - above), zero)
            reach = tl.minimum(m * ((margin + room + 127) << 23).to(tl.float32, bitcast=True), MOST)
            fresh = tl.minimum(reciprocal(reach) * LARGEST, MOST)
            due = (present & ((passes % INTERVAL == 0) | (quant_scale == 0.0))) | (room > 0)
            quant_scale = tl.where(due & (m > 0.0), fresh, quant_scale)
            dequant_scale = tl.where(quant_scale > 0.0, reciprocal(quant_scale), dequant_scale)
            tl.store(scales_ptr + slot, quant_scale, mask=inside)
            tl.store(scales_ptr + slots + slot, dequant_scale, mask=inside)
        tl.store(known_ptr + slot, tl.where(look == 0, quant_scale, 0.0), mask=inside)
        tl.store(known_ptr + slots + slot, tl.where(look == 0, dequant_scale, 0.0), mask=inside)


    tl.store(room_ptr, needed)


@triton.jit
def _needed_before(counts_ptr, slot, inside, slots):
    over = tl.load(counts_ptr + 5 * slots + slot, mask=inside, other=0)
    hold = tl.load(counts_ptr + 6 * slots + slot, mask=inside, other=0)
    return tl.where(hold > 0, over, 0)


@triton.jit
def _reached(amaxes_ptr, scales_ptr, counts_ptr, slot, inside, slots):
    """amax, amax * quant_scale, and whether the tensor was quantized with that scale and is finite."""
    amax = tl.load(amaxes_ptr + slot, mask=inside, other=-1.0)
    quant_scale = tl.load(scales_ptr + slot, mask=inside, other=0.0)
    look = tl.load(counts_ptr + 8 * slots + slot, mask=inside, other=0)
    known = (amax >= 0.0) & (amax < float("inf")) & (quant_scale > 0.0) & (look == 0)
    return amax, amax * quant_scale, known


@triton.jit
def _room(
    amax, reached, known, counts_ptr, slot, inside, slots, LARGEST: tl.constexpr, SATURATED_ABOVE: tl.constexpr
):
    """The exponent by which a slot was saturated last, for how many runs that gives room, and whether it may."""
    flows = tl.load(counts_ptr + 9 * slots + slot, mask=inside, other=1) == 0
    now = known & (reached > SATURATED_ABOVE) & flows
    bits = (reached * (1.0 / LARGEST)).to(tl.int32, bitcast=True)
    newest = tl.minimum(tl.maximum(((bits + 0x7FFFFF) >> 23) - 127, 0), 32)
    over = tl.where(now, newest, tl.load(counts_ptr + 5 * slots + slot, mask=inside, other=0))
    left = tl.load(counts_ptr + 6 * slots + slot, mask=inside, other=0) - (amax != -1.0).to(tl.int32)
    return over, tl.where(now, 2, tl.maximum(left, 0)), flows


@triton.jit
def _at(values, i, index):
    """values[:, index], one index per row."""
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
    algorithm: str = "max",
    interval: int = 1,
    *,
    room: Tensor | None = None,
) -> Tensor:
    """The update above, in place; ``known`` is returned. ``room``: None for slots that are all there are."""
    known = torch.empty_like(scales)
    room = room_for(counts) if room is None else room
    update_in_place(amaxes, history, scales, counts, room, known, largest, algorithm, interval)
    return known


def update_in_place(
    amaxes: Tensor,
    history: Tensor,
    scales: Tensor,
    counts: Tensor,
    room: Tensor,
    known: Tensor,
    largest: float,
    algorithm: str,
    interval: int,
) -> None:
    """``fp8_compile::update_scales_`` on a GPU: one launch, which is prepared once for all states of one size."""
    tensors = (amaxes, history, scales, counts, room, known)
    aligned = tuple([tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors])
    slots, length = history.shape
    launch, scalars = _prepared(history.device, aligned, slots, length, largest, algorithm, interval)
    with torch.cuda.device_of(history):  # Triton launches on the current device, wherever the tensors are
        launch(update_scales_kernel, *tensors, *scalars)


@functools.cache
def _prepared(
    device: torch.device, aligned: tuple[bool, ...], slots: int, length: int, *rule: Any
) -> tuple[Launch, tuple[Any, ...]]:
    """A launch for states that Triton compiles one kernel for, and the arguments that are not tensors."""
    grid, arguments = launch_arguments(slots, length, *rule)
    return Launch(grid, NUM_WARPS), tuple(arguments.values())


def launch_arguments(
    slots: int, length: int, largest: float, algorithm: str, interval: int
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and scalar arguments, in their order, for a state of ``slots`` histories of ``length``."""
    length_pow2, limits = triton.next_power_of_2(length), limits_of(largest)
    arguments = {
        "slots": slots,
        "LARGEST": largest,
        "SATURATED_ABOVE": largest * limits.saturated_above,
        "SMALL_BELOW": largest * limits.small_below,
        "MOST_ROOM": limits.most_room,
        "LENGTH": length,
        "LENGTH_POW2": length_pow2,
        "ALGORITHM": ALGORITHMS[algorithm],
        "INTERVAL": interval,
        "BLOCK": max(1, BLOCK_ELEMENTS // length_pow2),
    }
    return (1, 1, 1), arguments
