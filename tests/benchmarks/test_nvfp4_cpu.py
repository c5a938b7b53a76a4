"""The benchmark of NVFP4 products runs, and its table says what was measured."""

from __future__ import annotations

import nvfp4_cpu
import pytest


def test_every_contender_is_timed_and_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nvfp4_cpu, "BEYOND_CACHES", 1 << 18)
    few, many = (nvfp4_cpu.measure(128, 256, m, cold=True, rounds=2, ggml=None) for m in (1, 20))
    ours, torchs = {"nvfp4 int8", "nvfp4 bf16", "nvfp4 fp32", "int8, 4 KB"}, {"torch bf16", "torch fp32"}
    assert set(many["ms"]) == ours | torchs and set(few["ms"]) == ours | torchs | {"torch int4", "read"}
    assert all(took > 0 for took in few["ms"].values())
    few["ms"].update({"nvfp4 int8": 0.5, "torch bf16": 2.0, "torch fp32": 4.0, "torch int4": 1.0, "read": 0.4})
    nvfp4_cpu.show(few)
    line = next(line for line in capsys.readouterr().out.splitlines() if "nvfp4 int8" in line)
    assert line.split() == ["nvfp4", "int8", "0.500", "4.00", "8.00", "2.00", "80%"]
