"""The benchmark of host time runs, its table says what was measured, and nothing of its stand-ins is left."""

from __future__ import annotations

import sys
from typing import Any

import host_time_gpu
import pytest
import triton

from fp8_compile.kernels.gpu import quantize_many, update_scales


def left_behind() -> tuple[Any, ...]:
    """What a stand-in could have been put into."""
    kernels = (quantize_many.quantize_many_kernel, update_scales.update_scales_kernel)
    prepared = update_scales._prepared.cache_info().currsize
    return triton.runtime.driver._active, prepared, *(len(kernel.device_caches) for kernel in kernels)


def test_every_call_is_timed_and_a_step_launches_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = left_behind()
    monkeypatch.setattr(sys, "argv", ["host_time_gpu.py", "--weights", "5", "--calls", "2", "--rounds", "2"])
    host_time_gpu.main()
    rows = capsys.readouterr().out.splitlines()[1:-1]
    found = {row[:28].strip(): row[28:].split() for row in rows}
    gemms = [f"{what}, {way}" for way in ("C++", "Python") for what in ("cuBLASLt", "fp8_compile op")]
    triton_launches = ["quantize_many", "quantize_many, checking", "update_scales"]
    assert list(found) == [*gemms, *triton_launches]
    assert all(float(numbers[0]) > 0 for numbers in found.values())
    assert [found[name][1] for name in triton_launches] == ["1", "1", "1"]
    assert left_behind() == before
