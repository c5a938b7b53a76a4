"""Delayed scaling's update of all slots of a format in one call of C++, bit-equal to ``delayed_scaling.update``."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_compile.kernels import delayed_scaling as reference
from fp8_compile.kernels.operands import ANY, FP32, check, check_at_least, check_value

from .library import library

ALGORITHMS = {"max": 0, "most_recent": 1, "p99": 2, "frozen": 3}


def update_scales(
    amaxes: Tensor,
    history: Tensor,
    scales: Tensor,
    counts: Tensor,
    known: Tensor,
    largest: float,
    algorithm: str,
    interval: int,
) -> None:
    """``fp8_compile::update_scales_`` on a CPU."""
    op = "update_scales_"
    check(op, "history", history, FP32, (ANY, ANY), contiguous=True)
    slots, length = history.shape
    check_at_least(op, "history.shape[1]", length, 1)
    check(op, "amaxes", amaxes, FP32, (slots,), contiguous=True)
    check(op, "scales", scales, FP32, (2, slots), contiguous=True)
    check(op, "counts", counts, (torch.int32,), (reference.STEADY + 1, slots), contiguous=True)
    check(op, "known", known, FP32, (2, slots), contiguous=True)
    check_value(op, "largest", largest, reference.LARGEST)
    check_value(op, "algorithm", algorithm, ALGORITHMS)
    check_at_least(op, "interval", interval, 1)
    kernels = library()
    if kernels is None:
        reference.update_in_place(amaxes, history, scales, counts, known, largest, algorithm, interval)
        return
    limits = reference.limits_of(largest)
    kernels.fp8_update_scales(
        *history.shape,
        *(tensor.data_ptr() for tensor in (amaxes, history, scales, counts, known)),
        *(largest, largest * limits.saturated_above, largest * limits.small_below, limits.most_room),
        *(ALGORITHMS[algorithm], interval),
    )

