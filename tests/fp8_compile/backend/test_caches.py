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
from instruction_sets import share_kernels
from torch import nn

from fp8_compile import Report
from fp8_compile.backend.report_cache import ReportCache
from fp8_compile.passes.graph.row import Row

# Compiles models of one layer, each of the same size, and prints what the backend says of each.
SCRIPT = """
import json, sys
import torch
from torch import nn
from fp8_compile import Backend, Config

for name, options in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, backend = nn.Sequential(), Backend(Config(**options))
    model.add_module(name, nn.Linear(32, 32))
    x = torch.randn(16, 32)
    y = torch.compile(model, backend=backend)(x)
    y.square().sum().backward()
    exact = model(x)
    noise = (y - exact).square().sum() / exact.square().sum()
    (report,) = backend.reports
    print(json.dumps({**report.to_dict(), "noise": noise.item(), "summary": report.summary()}))
"""

JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "again": ("layer", {}),
    "excluded": ("layer", {"exclude": ["layer"]}),
    "renamed": ("head", {}),
    "dumped": ("layer", {"dump": "dumps"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("caches")
    (made / "script.py").write_text(SCRIPT)
    share_kernels(made / "cache")
    return made


def run(folder: Path, jobs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The reports of a process of its own; all processes share one cache."""
    environ = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    environ.pop("FP8_COMPILE_DUMP", None)
    command = [sys.executable, "script.py", json.dumps(jobs)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def first(folder: Path) -> dict[str, Any]:
    (report,) = run(folder, [("layer", {})])
    return report


@pytest.fixture(scope="module")
def second(folder: Path, first: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The second process compiles the first one's model again, and models that look alike."""
    return dict(zip(JOBS, run(folder, list(JOBS.values()))))


def rows(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(row["module"], row["gemm"], row["decision"]) for row in report["rows"]]


def test_the_second_process_finds_the_code_and_says_so(first: dict[str, Any], second: dict[str, Any]) -> None:
    again = second["again"]
    assert (first["cache"], again["cache"]) == ("miss", "hit")
    assert rows(again) == rows(first) and again["noise"] == first["noise"]
    assert "cache" not in first["summary"] and again["summary"].endswith("code from Inductor's cache")


def test_other_exclusions_get_code_of_their_own(first: dict[str, Any], second: dict[str, Any]) -> None:
    excluded = second["excluded"]
    assert excluded["cache"] == "miss" and excluded["rewritten"] == 0
    assert excluded["noise"] < 1e-10 < 1e-4 < first["noise"], "the excluded model ran in FP8, or the first one did not"


def test_a_model_with_another_name_only_gets_code_of_its_own(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Called ``head``, the same layer is an output head and stays in high precision."""
    renamed = second["renamed"]
    assert renamed["cache"] == "miss" and {row[0] for row in rows(renamed)} == {"head"}
    assert renamed["noise"] < 1e-10 < first["noise"]


def test_dumps_are_written_also_with_a_warm_cache(folder: Path, first: dict[str, Any], second: dict[str, Any]) -> None:
    assert second["dumped"]["cache"] == "off" and rows(second["dumped"]) == rows(first)
    dump = folder / "dumps" / "graph_000"
    names = {path.name for path in dump.iterdir()}
    assert {"report.json", "joint.00_before.py", "joint.01_rewrite_matmuls.py", "joint.graphml", "joint.dot"} <= names
    assert rows(json.loads((dump / "report.json").read_text())) == rows(first)


# --- the reports beside the cache


def entry(folder: Path, monkeypatch: pytest.MonkeyPatch, key: str = "key", size: int = 8) -> ReportCache:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return ReportCache.entry(torch.fx.symbolic_trace(nn.ReLU()), [torch.ones(size)], key)


ROW = Row("a", "output", (8, 16, "s0"), "rewritten", "tensorwise", formats=("e4m3", "e4m3"))
REPORT = Report((ROW,), "tensorwise", "cpu")


def test_a_stored_report_comes_back_marked_as_a_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entry(tmp_path, monkeypatch)
    made.write(REPORT, [])
    found = entry(tmp_path, monkeypatch)
    assert found.key == made.key, "Inductor's key must be the same, or its cache is never warm"
    assert found.read().rows == REPORT.rows and found.read().cache == "hit"


def test_what_differs_has_an_entry_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry(tmp_path, monkeypatch).write(REPORT, [])
    assert entry(tmp_path, monkeypatch, key="other").stored is None
    assert entry(tmp_path, monkeypatch, size=9).stored is None


DAMAGED = ["", "{", "[]", "null", '{"word": 1}', '{"word": "x", "report": {}}', '{"report": null, "word": "x"}']


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_report_means_compiling_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entry(tmp_path, monkeypatch)
    made.write(REPORT, [])
    made.path.write_text(damage)
    again = entry(tmp_path, monkeypatch)
    assert again.stored is None and again.key != made.key, "code whose report is lost must not be found"


def test_a_cache_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = entry(tmp_path, monkeypatch)
    (tmp_path / "fp8_compile").write_text("a file where the folder should be")
    made.write(REPORT, [])
    assert entry(tmp_path, monkeypatch).stored is None
