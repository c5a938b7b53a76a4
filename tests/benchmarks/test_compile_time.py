"""The benchmark of compile time measures each side in a process of its own, and its table has the ratios."""

from __future__ import annotations

import json
import pathlib
import sys

import compile_time
import pytest
from compile_time import INDUCTOR, Seconds


def test_a_measurement_is_a_process_with_a_cache_folder_of_its_own(tmp_path: pathlib.Path) -> None:
    took = compile_time.measure("explain", "", 1, tmp_path)
    assert 0 < took.wall and 0 < took.cpu
    with pytest.raises(RuntimeError, match="--measure nothing inductor 1 ended with exit code 1"):
        compile_time.measure("nothing", INDUCTOR, 1, tmp_path)


def test_sides_take_turns_and_ratios_are_those_of_a_round(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    asked = []
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "kernels.so").touch()

    def measure(what: str, side: str, layers: int, cache: pathlib.Path) -> Seconds:
        assert [file.name for file in (cache / compile_time.LIBRARY).iterdir()] == ["kernels.so"]
        warm = (cache / "filled").exists()
        (cache / "filled").touch()
        asked.append((what, side, layers, warm))
        slow = 2.0 if len(asked) > 6 else 1.0  # the machine, in the second round
        factor = {INDUCTOR: 1.0, "delayed": 1.5, "tensorwise": 1.25, "": 1.0}[side]
        return Seconds(10 * factor * slow, 20 * factor)

    monkeypatch.setattr(compile_time, "measure", measure)
    monkeypatch.setattr(compile_time, "built_library", lambda folder: tmp_path / "library")
    monkeypatch.setattr(sys, "argv", ["compile_time.py", "--rounds", "2", "--only", "whole", "explain"])
    compile_time.main()
    one_round = [("whole", side, 12, warm) for side in (INDUCTOR, "delayed", "tensorwise") for warm in (False, True)]
    assert asked == [*one_round, *one_round, *[("explain", "", 32, False)] * 2]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["whole", "inductor", "15.0", "s", "20.0", "s"]
    assert lines[2] == ["whole", "delayed", "22.5", "s", "1.50x", "30.0", "s", "1.50x"]
    assert lines[6][:2] == ["warm", "tensorwise"] and lines[6][4] == "1.25x"
    assert lines[7] == ["explain", "20.0", "s", "20.0", "s"]

    asked.clear()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--json"])
    compile_time.main()
    assert json.loads(capsys.readouterr().out)[1]["wall ratio"] == 1.5
