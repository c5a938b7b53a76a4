"""Delayed scaling's update of all slots of a format in one call of C++, bit-equal to ``delayed_scaling.update``."""

from __future__ import annotations

from torch import Tensor

from fp8_compile.kernels import delayed_scaling as reference
from fp8_compile.kernels.define_op import library as operations

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


operations.impl("update_scales_", update_scales, "CPU")
