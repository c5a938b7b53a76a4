"""Passes recorded while a model trains: what is written is what happened, and nothing of the training changes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Config
from fp8_compile.reporting.graph_stages import decode
from fp8_compile.reporting.report_page import refresh
from fp8_compile.scaling import recorder as run_recorder

PASSES = 5


class Two(nn.Module):
    """Two layers, a relu between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def batch(number: int) -> torch.Tensor:
    """One row of sixteen is larger than the others, and grows by more than an input's margin of 4."""
    return torch.full((16, 32), 5.0 ** (number - 1)).index_fill_(0, torch.tensor([0]), 3.0 * 5.0 ** (number - 1))


class Run:
    """A model trained with a dump and statistics, and its twin without either."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        model = Two()
        twin = copy.deepcopy(model)
        compiled = torch.compile(model, backend="fp8", options={"dump": str(folder), "stats": True})
        plain = torch.compile(twin, backend="fp8")
        self.state, self.folder = fp8_compile.scaling_state(model), folder / "graph_000"
        self.equal = []
        for number in range(1, PASSES + 1):
            results = [one(batch(number)) for one in (compiled, plain)]
            for result in results:
                result.sum().backward()
            self.equal.append(torch.equal(*results))
        self.before_the_end = self.lines()
        self.state.recorders[0].finish()
        self.stats = {row.slot: row for row in self.state.stats()}

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "passes.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    torch._dynamo.reset()
    return Run(tmp_path_factory.mktemp("dumps"))


def test_each_pass_is_recorded_with_its_own_amax_and_the_scale_that_it_used(run: Run) -> None:
    head, *moments = run.lines()
    assert set(head["slots"]) == {f"{m}#0.{r}" for m in ("up", "down") for r in ("input", "weight", "grad_output")}
    at = head["slots"].index("up#0.input")
    assert [moment["pass"] for moment in moments] == [1, 2, 3, 4, 5]
    assert [moment["amax"][at] for moment in moments] == [3.0, 15.0, 75.0, 375.0, 1875.0]
    # The first pass looked at the tensor itself; then each used the largest amax of those before, with a margin of 4,
    # and twice that in the two passes after one in which the tensor was saturated by less than a factor of 2.
    scales = [moment["scale"][at] for moment in moments]
    reach = [3 * 4, 15 * 4 * 2, 75 * 4 * 2, 375 * 4]
    assert scales[0] == 0 and scales[1:] == pytest.approx([448 / most for most in reach], rel=1e-5)
    assert head["largest"][at] == 448 and head["largest"][head["slots"].index("up#0.grad_output")] == 57344


def test_counts_are_those_of_the_pass_and_add_up_to_the_statistics(run: Run) -> None:
    head, *moments = run.lines()
    at = head["slots"].index("up#0.input")
    assert [moment["elements"][at] for moment in moments] == [16 * 32] * PASSES
    # One row of sixteen is beyond what the scale holds, unless the jump before has made room.
    assert [moment["overflow"][at] for moment in moments] == [0, 32, 0, 0, 32]
    for index, slot in enumerate(head["slots"]):
        for field in ("elements", "overflow", "underflow"):
            assert sum(moment[field][index] for moment in moments) == getattr(run.stats[slot], field), (slot, field)


def test_recording_changes_nothing_and_the_last_pass_is_written_at_the_end(run: Run) -> None:
    assert run.equal == [True] * PASSES
    assert len(run.before_the_end) == 1 + PASSES - 1 and len(run.lines()) == 1 + PASSES


def test_the_page_is_made_anew_with_what_was_recorded(run: Run) -> None:
    text = (run.folder / "report.html").read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["passes"]["label"] == [1, 2, 3, 4, 5] and data["report"]["rewritten"] == 5


def test_the_report_has_code_lines_slots_bytes_and_graphs_whose_gemms_are_linked(run: Run) -> None:
    report = json.loads((run.folder / "report.json").read_text())
    up = next(row for row in report["rows"] if row["module"] == "up" and row["gemm"] == "output")
    assert "test_recorder.py:" in up["code"] and up["code"].endswith("return self.down(self.up(x).relu())")
    assert report["slots"][up["node"]] == ["up#0.input", "up#0.weight"]
    # x [16, 32], w [64, 32], y [16, 64] in FP32, then in FP8 but for y; and two scales.
    assert report["traffic"]["by_site"][up["node"]] == [4 * (512 + 2048 + 1024), 512 + 2048 + 4 * 1024 + 8]
    stages = {stage.id: stage for stage in decode(json.loads((run.folder / "graphs.json").read_text()))}
    assert list(stages) == ["before", "rewritten", "lowered", "forward", "backward"]
    for id, kind in (("before", "matmul"), ("rewritten", "fp8_matmul"), ("lowered", "fp8_matmul")):
        columns = stages[id].columns
        sites = [site for site, one in zip(columns["site"], columns["kind"]) if one == kind]
        assert sorted(sites) == sorted(row["node"] for row in report["rows"]), id
    assert "up.weight" in stages["before"].columns["module"]


def test_with_statistics_fp8_is_what_is_kept_for_backward(run: Run) -> None:
    saved = json.loads((run.folder / "report.json").read_text())["saved_for_backward"]
    # Inputs of both layers, a byte an element; before, FP32. Weights are there anyway and quantized again.
    assert saved["fp8"] == 16 * 32 + 16 * 64 and saved["fp8_before"] == 4 * saved["fp8"]


def test_a_step_recorded_by_hand_is_labelled_and_ends_the_automatic_record(run: Run) -> None:
    recorder = run.state.recorders[0]
    lines = len(run.lines())
    recorder.begin_run()
    run.state.tables[0].amaxes.fill_(1.5)  # as a pass would
    run.state.stats()  # takes the amaxes over, as whoever looks does
    run.state.record(step=70)
    assert run.lines()[-1]["step"] == 70 and run.lines()[-1]["amax"][0] == 1.5
    recorder.begin_run()
    recorder.begin_run()
    assert len(run.lines()) == lines + 1


def test_long_runs_are_thinned_out_and_lose_no_count(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        state = run.state
        places = dict(run.state.slots())

    monkeypatch.setattr(run_recorder, "LINES_BEFORE_THINNING", 8)
    monkeypatch.setattr(run_recorder.RunRecorder, "_write_page", lambda self: None)
    run.state.reset_stats()
    others, run.state.recorders = run.state.recorders, []
    try:
        recorder = run_recorder.RunRecorder(tmp_path / run_recorder.FILE, Pool(), refresh)  # type: ignore[arg-type]
        for _ in range(64):
            recorder.begin_run()
            run.state.tables[0].amaxes.fill_(2.0)
            run.state.tables[0].stats[:, 0] += 100
        recorder.finish()
    finally:
        run.state.recorders = others
    moments = [json.loads(line) for line in (tmp_path / "passes.jsonl").read_text().splitlines()][1:]
    assert [moment["pass"] for moment in moments][:12] == [*range(1, 9), 10, 12, 14, 16]
    assert len(moments) < 32 and moments[-1]["pass"] == 64
    assert sum(moment["elements"][0] for moment in moments) == 6400


def test_a_folder_that_is_gone_is_one_warning_and_training_goes_on(
    tmp_path: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = run.state.recorders[0]
    folder, recorder.folder = recorder.folder, tmp_path / "gone"
    run.state.tables[0].amaxes.fill_(1.0)
    with caplog.at_level("WARNING", "fp8_compile"):
        for step in range(3):
            recorder.begin_run()
            run.state.record(step)
    recorder.folder = folder
    assert recorder._stopped


def test_modules_that_run_one_graph_are_named_and_recorded_each_in_a_file(tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.layer(x))

    torch._dynamo.reset()
    model = nn.Sequential(*(Block() for _ in range(3)))
    backend = UncompiledBackend(Config(dump=tmp_path, stats=True))
    for block in model:
        block.compile(backend=backend)
    for _ in range(3):
        model(torch.randn(16, 32, requires_grad=True)).sum().backward()
    (folder,) = tmp_path.iterdir()
    assert json.loads((folder / "report.json").read_text())["modules"] == ["0", "1", "2"]
    for name in ("passes.jsonl", "passes.1.jsonl", "passes.2.jsonl"):
        head, *moments = map(json.loads, (folder / name).read_text().splitlines())
        assert head["slots"] == ["layer#0.input", "layer#0.weight", "layer#0.grad_output"] and len(moments) >= 2
