"""The benchmark of what the host costs runs, and its lines say what was measured."""

from __future__ import annotations

import pathlib
import re

import host_time
import pytest
import torch


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "CALLS", 2)
    monkeypatch.setattr(host_time, "WARM", 2)


def test_a_ratio_is_that_of_rounds_and_not_of_times(capsys: pytest.CaptureFixture[str]) -> None:
    """A neighbour that slows both by ten in one round changes nothing."""
    found = {"inductor": [1e-6, 10e-6, 1e-6], "ours": [2e-6, 20e-6, 2e-6]}
    assert host_time.ratio(found["ours"], found["inductor"]) == pytest.approx(2.0)
    host_time.show("a title", found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "a title" and lines[-1].split() == ["ours", "2.0", "us", "2.00", "x", "inductor"]


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def contender(name: str) -> host_time.Timed:
        return lambda: float(bool(order.append(name)))

    found = host_time.take_turns({"a": contender("a"), "b": contender("b")}, rounds=3)
    assert order[-6:] == ["a", "b"] * 3 and {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3}


def test_every_operation_in_c_plus_plus_that_a_layer_calls_has_a_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host_time.operations(2, tmp_path)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert all(re.fullmatch(r" +[a-z].*? +\d+\.\d us, the call alone +\d+\.\d us", line) for line in lines)
    for name in ("scaled_mm", "quantize_delayed", "quantize_mm", "nvfp4_mm", "update_scales_"):
        assert any(line.split()[0].rstrip(",") == name for line in lines), name


def test_layers_are_compared_with_inductor(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_time, "LAYERS", 1)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)  # what is timed here does not matter
    monkeypatch.setattr(host_time.fp8_compile, "freeze_scales", lambda model: None)
    host_time.layers(2, tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("1.00 x inductor") >= 3 and "inference" in printed and "forward and backward" in printed
    for name in ("fp8, tensorwise", "fp8, rowwise", "fp8, delayed", "fp8, delayed, frozen", "fp8, packed"):
        assert name in printed


def test_a_section_that_there_is_none_of_is_named(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["host_time.py", "layers", "runners"])
    with pytest.raises(SystemExit):
        host_time.main()
    assert "unknown section runners; expected some of layers, operations, runner, decode" in capsys.readouterr().err


def test_the_runner_has_a_line_without_and_with_attach(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host_time.runner(2, tmp_path)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [re.sub(r" +[\d.]+ us$", "", line).strip() for line in lines] == ["without attach", "with attach"]
