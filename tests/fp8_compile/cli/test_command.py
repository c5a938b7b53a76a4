"""The command line through real processes: what it prints, how it ends, and that mistakes are one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from made_up_dump import write_dump

import fp8_compile
from fp8_compile.cli.command import INTERRUPTED, MISTAKE, all_verbs, main
from fp8_compile.cli.verbs import bench

FACTORY = """
import torch
class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("\\x1b[31m<b>数", torch.nn.Linear(32, 16))
        self.add_module("lm_head", torch.nn.Linear(16, 16))
    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x
def make():
    return Odd(), (torch.zeros(16, 32),)
"""


def start(*arguments: str | Path, folder: Path | None = None) -> subprocess.Popen[str]:
    """Our command in a process of its own, in C's locale: not even its terminal knows UTF-8."""
    return subprocess.Popen(
        [sys.executable, "-m", "fp8_compile", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        # Where the tests run in the background, an interrupt is ignored, and so it would be here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def test_each_verb_is_a_file_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    found = all_verbs()
    assert {"bench", "diff", "doctor", "explain", "pack", "view"} <= set(found)
    for name, verb in found.items():
        assert verb.HELP and len(verb.__doc__ or "") > 100, name


def test_doctor_tries_everything_and_its_exit_code_says_whether_anything_is_red() -> None:
    code, out, _ = finish(start("doctor", "--json"))
    checks = {check["name"]: check for check in json.loads(out)}
    assert checks["torch"]["found"] == str(__import__("torch").__version__)
    assert "values rounded as the reference does" in checks["CPU kernels"]["found"]
    assert checks["bf16 and fp16 matmul"] == {
        "name": "bf16 and fp16 matmul", "status": "ok", "found": "exact", "remedy": ""
    }  # fmt: skip
    assert code == int(any(check["status"] == "bad" for check in checks.values()))
    assert all(check["remedy"] for check in checks.values() if check["status"] != "ok")


def test_explain_reports_on_a_factory_with_hostile_names_and_dumps_a_page(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(FACTORY, encoding="utf-8")
    code, out, _ = finish(start("explain", "odd:make", "--dump", "dumps", "--option", "min_dim=8", folder=tmp_path))
    assert code == 0
    assert "\x1b" not in out and r"\x1b[31m<b>\u6570" in out  # a terminal is not told to turn red
    assert "rewrote 2 of 5 matmuls" in out
    page = (tmp_path / "dumps" / "graph_000" / "report.html").read_text(encoding="utf-8")
    assert "<b>" not in page.partition('id="data">')[2].partition("</script>")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("view", "absent"), "absent is not a folder"),
        (("view", ".", "--port", "70000"), "--port 70000 is not a port"),
        (("diff", ".", "report.json"), "Expected an object as fp8_compile dumps it"),
        (("diff", "absent", "absent"), "absent is not a folder"),
        (("bench", "nonsense"), "no benchmark is called nonsense; expected some of: "),
        (("explain", "odd:make", "--recipe", "rowise"), "(did you mean 'rowwise'?)"),
        (("explain", "odd:make", "--option", "margin"), "expected NAME=VALUE such as margin=1"),
        (("explain", "odd:make", "--option", "margins=1"), "(did you mean 'margin'?)"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "report.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == MISTAKE
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"fp8-compile {arguments[0]}: ") and message in err


def test_a_model_that_fails_is_one_line_in_a_real_process(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("import torch\nmodel = torch.nn.Linear(2, 3)\n")
    code, out, err = finish(start("explain", "odd:model", "--input", "float32[4,5]", folder=tmp_path))
    assert code == MISTAKE and out == ""
    assert err.splitlines()[-1].startswith("fp8-compile explain: odd:model does not run with these inputs: ")


def test_view_serves_the_pages_to_this_machine_alone_until_it_is_interrupted(tmp_path: Path) -> None:
    write_dump(tmp_path / "run" / "graph_000", ["up", "<script>alert(1)</script>"])
    write_dump(tmp_path / "run" / "graph_001", ["down"])
    (tmp_path / "secret").write_text("not yours")
    process = start("view", tmp_path / "run", "--no-browser")
    assert process.stdout is not None
    line = process.stdout.readline()
    address = line.split(" at ")[1].split()[0]
    assert line.startswith("serving 2 reports at http://127.0.0.1:")

    def get(path: str, **headers: str) -> str:
        request = urllib.request.Request(address + path, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read().decode()

    listed = get("")
    assert "graph_001" in listed and "1 of 1 matmuls" in listed and "<script>" not in listed
    assert 'id="data">' in get("graph_000")
    for path, headers, status in (("../secret", {}, 404), ("graph_000", {"Host": "evil.example:80"}, 403)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(path, **headers)
        assert caught.value.code == status
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 0


def test_diff_tells_what_changed_and_its_exit_code_whether_anything_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write_dump(tmp_path / "old" / "graph_000", ["a", "b", "c"])
    new = write_dump(tmp_path / "new" / "graph_000", ["a", "c", "b", "d"])
    assert main(("diff", str(old), str(old))) == 0
    assert capsys.readouterr().out == "the same\n"
    assert main(("diff", str(tmp_path / "old"), str(new / "report.json"))) == 1
    out = capsys.readouterr().out
    assert "matmuls: 3 -> 4" in out and "+ d output" in out
    assert "~ c output  decision: skipped -> rewritten" in out and "formats: none -> e4m3xe4m3" in out


def test_bench_lists_what_a_checkout_has_and_an_interrupt_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    process = start("bench", "saved_bytes")
    assert main(("bench", "--list")) == 0
    out = capsys.readouterr().out
    assert "saved_bytes" in out and "Bytes saved for backward" in out
    assert process.stdout is not None and process.stdout.readline() == "== saved_bytes\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == INTERRUPTED and err.strip().endswith("interrupted")


@pytest.mark.skipif(not hasattr(fp8_compile, "pack_folder"), reason="fp8_compile.pack_folder is not there yet")
def test_pack_packs_a_folder_and_refuses_one_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    weights = {"model.layers.0.mlp.up_proj.weight": torch.randn(64, 128), "model.norm.weight": torch.ones(64)}
    safetensors.save_file(weights, source / "model.safetensors")
    assert main(("pack", str(source), str(tmp_path / "packed"), "--method", "rtn", "--quiet")) == 0
    assert capsys.readouterr().out.startswith("packed 1 layer: ")
    assert (tmp_path / "packed" / "config.json").exists()
    assert main(("pack", str(tmp_path / "absent"), str(tmp_path / "other"))) == MISTAKE
    err = capsys.readouterr().err
    assert "absent" in err and "Traceback" not in err and not (tmp_path / "other").exists()


def test_bench_runs_a_script_and_keeps_its_json_or_its_text(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "speaks.py").write_text('# "--json" __main__\nimport sys\nprint([len(sys.argv)])\n')
    (folder / "talks.py").write_text("# __main__\nprint('a table')\nraise SystemExit(3)\n")
    (folder / "part_of_another.py").write_text("")
    scripts = bench.find(folder)
    assert list(scripts) == ["speaks", "talks"]
    assert bench.measure(scripts["speaks"], ["--layers", "2"], as_json=True) == (0, [4])
    assert bench.measure(scripts["talks"], [], as_json=True) == (3, "a table\n")
