"""Packages that multiply FP8 by FP8: static and dynamic scales, in Python and C++, and what is said of them."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import pathlib
import shutil
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import fp8_compile
from fp8_compile.report import Report

COMPARE = pathlib.Path(__file__).parents[3] / "examples" / "cpp" / "compare.py"
ROUNDS_AS_EAGER = {"emulate_precision_casts": True}


class Gated(nn.Module):
    """Two layers of one input, odd sizes, a residual stream, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(40, 72), nn.Linear(40, 72, bias=False), nn.Linear(72, 40)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.silu(self.gate(x)) * self.up(x)
        mixed = x + self.down(hidden)
        return F.rms_norm(mixed, (40,)), mixed


class Exported(NamedTuple):
    model: nn.Module
    path: pathlib.Path
    report: Report
    dump: pathlib.Path
    options: dict[str, Any]
    inductor: dict[str, Any]


@pytest.fixture(scope="module", params=["static", "dynamic"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """bf16 with static scales; FP32, sizes of rows known to the C++ program, with dynamic ones."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    static = request.param == "static"
    model = Gated().eval().to(torch.bfloat16 if static else torch.float32)
    example = torch.randn(3, 5, 40).to(model.up.weight.dtype)
    options = {"activations": "fp8"}
    if static:
        options["calibration"] = fp8_compile.calibrate(model, [example], progress=False)
    sizes = ({0: Dim("batch"), 1: Dim("tokens")},) if static else ({0: Dim("rows")},)
    example, inductor = (example, ROUNDS_AS_EAGER) if static else (example[0], {})
    path, dump = folder / "model.pt2", folder / "dump"
    report = fp8_compile.export(
        model, (example,), path, weights="fp8", dynamic_shapes=sizes, dump=dump, inductor=inductor, **options
    )
    return Exported(model, path, report, dump, options, inductor)


def test_it_computes_what_the_compiled_model_does_bit_for_bit(exported: Exported) -> None:
    static, dtype = "calibration" in exported.options, exported.model.up.weight.dtype
    packed = copy.deepcopy(exported.model)
    fp8_compile.pack(packed, "fp8", progress=False, **exported.options)
    torch._dynamo.reset()
    options = {"inductor": exported.inductor}
    compiled = torch.compile(packed, backend="fp8", dynamic=True, options=options)
    loaded = fp8_compile.load(exported.path)
    with torch.no_grad():
        for sizes in ((6, 7), (1, 1), (4, 0)) if static else ((9,), (1,), (0,)):
            x = torch.randn(*sizes, 40).to(dtype)
            got, wanted, eager, plain = loaded(x), compiled(x), packed(x), exported.model(x)
            for one, two, three, four in zip(got, wanted, eager, plain):
                assert torch.equal(one, two), sizes
                assert (one - three).norm() <= 0.05 * three.norm() and (one - four).norm() <= 0.08 * four.norm()
                assert not x.numel() or not torch.equal(one, four)
        for bad in (math.inf, math.nan):
            x = torch.randn(2, 3, 40).to(dtype) if static else torch.randn(6, 40)
            x.view(6, 40)[4, 7] = bad
            for one, two in zip(loaded(x), compiled(x)):
                finite = one.view(6, 40).isfinite()
                assert not finite[4].any() and finite[[0, 1, 2, 3, 5]].all(), "an overflow neither vanishes nor spreads"
                assert torch.equal(one.isfinite(), two.isfinite())


def test_report_and_manifest_say_how_inputs_are_scaled(exported: Exported) -> None:
    static = "calibration" in exported.options
    kind = "static scale" if static else "dynamic scale a row"
    loaded = fp8_compile.load(exported.path)
    assert loaded.report.rows == exported.report.rows
    assert [row.module for row in loaded.report.rows] == ["gate", "up", "down"]
    assert {row.reason for row in loaded.report.rows} == {f"packed weight: fp8, inputs e4m3, {kind}"}
    assert {row.formats for row in loaded.report.rows} == {("e4m3", "e4m3")}
    summary = loaded.manifest.calibration
    assert loaded.manifest.options["activations"] == "fp8"
    if static:
        calibration = exported.options["calibration"]
        assert summary["up"] == {"rows": 15, "amax": float(calibration.amax("up")), "inputs": f"inputs e4m3, {kind}"}
        assert "emulate_precision_casts" in loaded.manifest.options["inductor"]
    else:
        assert summary is None


def test_dumps_are_those_of_the_backend(exported: Exported) -> None:
    (folder,) = exported.dump.iterdir()
    files = {file.name for file in folder.iterdir()}
    assert {"inference.00_before.py", "inference.graphml", "inference.dot", "forward.graphml"} <= files
    assert {"report.json", "report.txt", "report.html", "graphs.json"} <= files
    before, after = ((folder / f"inference.{one}.py").read_text() for one in ("00_before", "02_share_quantizes"))
    assert "round_inputs" in before and "scaled_mm" not in before
    assert after.count("fp8_compile.scaled_mm") == 3 and after.count("fp8_compile.quantize_inputs") == 2
    rows = json.loads((folder / "report.json").read_text())["rows"]
    assert [row["module"] for row in rows] == ["gate", "up", "down"] and all(row["node"] in before for row in rows)


def test_a_program_has_the_gemms_too_and_dumps_where_the_environment_says(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8_COMPILE_DUMP", str(tmp_path / "dump"))
    model, sizes = Gated().eval(), ({0: Dim("rows")},)
    options = {"weights": "fp8", "activations": "fp8", "exclude": ("gate",)}
    program = fp8_compile.export(
        model, (torch.randn(5, 40),), dynamic_shapes=sizes, format="exported_program", **options
    )
    rows = json.loads((tmp_path / "dump" / "graph_000" / "report.json").read_text())["rows"]
    assert {row["module"]: row["decision"] for row in rows} == {
        "gate": "skipped",
        "up": "rewritten",
        "down": "rewritten",
    }
    torch.export.save(program, tmp_path / "program.pt2")
    again = torch.export.load(tmp_path / "program.pt2").run_decompositions()
    ours = [node.target._schema.name for node in again.graph.nodes if "fp8_compile" in str(node.target)]
    assert ours == ["fp8_compile::quantize_inputs", "fp8_compile::scaled_mm"] * 2
    fp8_compile.pack(model, "fp8", activations="fp8", exclude=("gate",), progress=False)
    with torch.no_grad():
        x = torch.randn(7, 40)
        for one, two in zip(again.module()(x), model(x)):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake builds the C++ example, and is not installed")
@pytest.mark.parametrize("exported", ["dynamic"], indirect=True)
def test_the_cpp_example_builds_and_prints_the_same_numbers(exported: Exported, tmp_path: pathlib.Path) -> None:
    spec = importlib.util.spec_from_file_location("compare", COMPARE)
    compare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compare)
    program = compare.build(tmp_path / "build")
    for rows in (1, 6):
        wanted = torch.cat([one.flatten() for one in fp8_compile.load(exported.path)(compare.sines(rows, 40))])
        assert torch.equal(compare.printed(program, exported.path, rows, 40), wanted)
