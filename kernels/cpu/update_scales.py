"""The state of delayed scaling on a CPU: what is checked before it is written, and the formula without C++."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import Tensor

from fp8_compile.kernels import delayed_scaling as reference
from fp8_compile.kernels.operands import ANY, FP32, ONE, check, check_at_least, check_value

ALGORITHMS = ("max", "most_recent", "p99", "frozen")


def update_scales(
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
    """``fp8_compile::update_scales_`` on a CPU."""
    op = "update_scales_"
    check(op, "history", history, FP32, (ANY, ANY), contiguous=True)
    slots, length = history.shape
    check_at_least(op, "history.shape[1]", length, 1)
    check(op, "amaxes", amaxes, FP32, (slots,), contiguous=True)
    check(op, "scales", scales, FP32, (2, slots), contiguous=True)
    check(op, "counts", counts, (torch.int32,), (reference.STEADY + 1, slots), contiguous=True)
    check(op, "room", room, (torch.int32,), (1,), contiguous=True)
    check(op, "known", known, FP32, (2, slots), contiguous=True)
    check_value(op, "largest", largest, reference.LARGEST)
    check_value(op, "algorithm", algorithm, ALGORITHMS)
    check_at_least(op, "interval", interval, 1)
    reference.update_in_place(amaxes, history, scales, counts, room, known, largest, algorithm, interval)


def record_amaxes(amaxes: Tensor, recorded: Sequence[Tensor], rows: Sequence[int]) -> None:
    """``fp8_compile::record_amaxes_`` on a CPU."""
    _check_records("record_amaxes_", amaxes, recorded, rows)
    reference.record_in_place(amaxes, recorded, rows)


def accumulate_amaxes(amaxes: Tensor, recorded: Sequence[Tensor], rows: Sequence[int]) -> None:
    """``fp8_compile::accumulate_amaxes_`` on a CPU."""
    _check_records("accumulate_amaxes_", amaxes, recorded, rows)
    reference.accumulate_in_place(amaxes, recorded, rows)


def _check_records(op: str, amaxes: Tensor, recorded: Sequence[Tensor], rows: Sequence[int]) -> None:
    check(op, "amaxes", amaxes, FP32, (ANY,), contiguous=True)
    if len(recorded) != len(rows):
        expected = f"a row for each of the {len(recorded)} tensors in recorded"
        raise RuntimeError(f"fp8_compile::{op}: rows: expected {expected}, got {len(rows)}")
    for one, row in zip(recorded, rows):
        check(op, "recorded", one, FP32, *ONE)
        if not 0 <= row < amaxes.shape[0]:
            expected = f"rows from 0 to {amaxes.shape[0] - 1}"
            raise RuntimeError(f"fp8_compile::{op}: rows: expected {expected}, got {row}")
