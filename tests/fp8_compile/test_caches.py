"""Inductor's caches: warm in the second process, never for the wrong model, and dumps are written all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8_compile import Report
from fp8_compile.passes.row import Row
from fp8_compile.report_cache import ReportCache

# Compiles a model of one layer per name, each of the same size, and prints what the backend says of it.
SCRIPT = """
import json, sys
import torch
from torch import nn
from fp8_compile import Backend, Config

names, options = json.loads(sys.argv[1])

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(32, 32))

    def forward(self, x):
        for name in names:
            x = torch.tanh(self.get_submodule(name)(x))
        return x

torch.manual_seed(0)
model, backend = Model(), Backend(Config(**options))
x = torch.randn(16, 32)
y = torch.compile(model, backend=backend)(x)
y.sum().backward()
exact = model(x)
noise = (y - exact).square().sum() / exact.square().sum()
(report,) = backend.reports
print(json.dumps({**report.to_dict(), "noise": noise.item(), "summary": report.summary()}))
"""


class Process:
    """Runs the script in processes that share one cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "script.py").write_text(SCRIPT)

    def __call__(self, names: list[str], **options: Any) -> dict[str, Any]:
        environ = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        environ.pop("FP8_COMPILE_DUMP", None)
        command = [sys.executable, "script.py", json.dumps([names, options])]
        done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Process:
    return Process(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="module")
def first(process: Process) -> dict[str, Any]:
    return process(["a", "b"])


def rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(row["module"], row["gemm"], row["decision"]) for row in report["rows"]]


def test_the_second_process_finds_the_code_and_its_report_says_so(process: Process, first: dict[str, Any]) -> None:
    second = process(["a", "b"])
    assert (first["cache"], second["cache"]) == ("miss", "hit")
    assert rows(second) == rows(first) and second["noise"] == first["noise"]
    assert "cache" not in first["summary"] and second["summary"].endswith("code from Inductor's cache")


def test_other_exclusions_get_code_of_their_own(process: Process, first: dict[str, Any]) -> None:
    excluded = process(["a", "b"], exclude=["a", "b"])
    assert excluded["cache"] == "miss" and excluded["rewritten"] == 0
    assert excluded["noise"] < 1e-10 < 1e-4 < first["noise"], "the excluded model ran in FP8, or the first one did not"


def test_a_model_that_differs_in_a_name_only_gets_code_of_its_own(process: Process, first: dict[str, Any]) -> None:
    """Called ``head``, the same layer is an output head and stays in high precision."""
    named = process(["a", "head"])
    assert named["cache"] == "miss"
    assert {row[0] for row in rows(named) if row[2] == "skipped"} == {"head"}
    assert named["noise"] < first["noise"]


def test_dumps_are_written_also_with_a_warm_cache(process: Process, first: dict[str, Any]) -> None:
    dumped = process(["a", "b"], dump=str(process.folder / "dumps"))
    assert dumped["cache"] == "off" and rows(dumped) == rows(first)
    names = {path.name for path in (process.folder / "dumps" / "graph_000").iterdir()}
    assert {"report.json", "joint.00_before.py", "joint.01_rewrite_matmuls.py", "joint.graphml", "joint.dot"} <= names
    written = json.loads((process.folder / "dumps" / "graph_000" / "report.json").read_text())
    assert rows(written) == rows(first)


# --- the reports beside the cache


def entry(folder: Path, monkeypatch: pytest.MonkeyPatch, key: str = "key", size: int = 8) -> ReportCache:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return ReportCache.entry(torch.fx.symbolic_trace(nn.ReLU()), [torch.ones(size)], key)


REPORT = Report((Row("a", "output", (8, 16, "s0"), "rewritten", "tensorwise", formats=("e4m3", "e4m3")),), "tensorwise", "cpu")


def test_a_stored_report_comes_back_marked_as_a_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entry(tmp_path, monkeypatch)
    made.write(REPORT)
    found = entry(tmp_path, monkeypatch)
    assert found.key == made.key, "Inductor's key must be the same, or its cache is never warm"
    assert found.read().rows == REPORT.rows and found.read().cache == "hit"


def test_what_differs_has_an_entry_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry(tmp_path, monkeypatch).write(REPORT)
    assert entry(tmp_path, monkeypatch, key="other").stored is None
    assert entry(tmp_path, monkeypatch, size=9).stored is None


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"word": 1}', '{"word": "x", "report": {}}', '{"report": null, "word": "x"}'])
def test_a_damaged_or_lost_report_means_compiling_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entry(tmp_path, monkeypatch)
    made.write(REPORT)
    made.path.write_text(damage)
    again = entry(tmp_path, monkeypatch)
    assert again.stored is None and again.key != made.key, "code whose report is lost must not be found"


def test_a_cache_that_cannot_be_written_does_not_stop_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entry(tmp_path, monkeypatch)
    (tmp_path / "fp8_compile").write_text("a file where the folder should be")
    made.write(REPORT)
    assert entry(tmp_path, monkeypatch).stored is None
