"""The doctor's checks on machines that lack something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8_compile.cli import machine
from fp8_compile.cli.command import main
from fp8_compile.torch_internals import onednn


def test_a_check_that_breaks_is_red_and_says_of_what() -> None:
    def some_check() -> machine.Check:
        raise ZeroDivisionError("by nothing")

    assert machine._tried(some_check) == machine.Check("some check", "bad", "ZeroDivisionError: by nothing")


def test_each_red_check_makes_the_exit_code_one_and_shows_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [machine.Check("a", "ok", "fine"), machine.Check("b", "bad", "\x1b[2Jgone", "buy one")]
    monkeypatch.setattr(machine, "examine", lambda **_: checks)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == "ok   a  fine\nBAD  b  \\x1b[2Jgone\n        buy one\n"
    checks.pop()
    assert main(["doctor"]) == 0


@pytest.mark.parametrize(
    "version, status, remedy",
    [
        ("2.9.1", "bad", "pip install 'torch==2.15.*'"),
        ("2.12.1+cpu", "bad", "pip install 'torch==2.15.*'"),
        ("2.13.0+cpu", "ok", ""),
        ("2.14.1+cu130", "ok", ""),
        ("2.15.0+cu132", "ok", ""),
        ("2.16.0a0+git1234567", "note", "it works as far as the self-checks hold"),
        ("3.0.0", "note", "it works as far as the self-checks hold"),
    ],
)
def test_an_older_torch_is_red_and_a_newer_one_gets_a_note(
    version: str, status: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.pytorch().status == "ok"
    monkeypatch.setattr(torch, "__version__", version)
    check = machine.pytorch()
    assert (check.status, check.found) == (status, version) and remedy in check.remedy


@pytest.mark.parametrize(
    "torch_version, version, status, remedy",
    [
        ("2.13.0", "3.7.1", "ok", ""),
        ("2.15.0", "3.9.0", "ok", ""),
        ("2.15.0", "3.7.1", "bad", "pip install 'triton==3.9.*': it goes with torch 2.15"),
        ("2.16.0", "3.10.0", "ok", ""),
        ("2.14.1", None, "note", "pip install 'triton==3.8.*'; code for GPUs needs it"),
    ],
)
def test_triton_is_that_of_the_running_torch(
    torch_version: str, version: str | None, status: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return version

    assert machine.triton().status == "ok"
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(machine.importlib.metadata, "version", installed)
    check = machine.triton()
    assert check == machine.Check("triton", status, version or "not installed", remedy)  # type: ignore[arg-type]


def test_a_machine_without_compiler_headers_or_cache_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "no-such-compiler")
    assert machine.compiler() == machine.Check(
        "C++ compiler",
        "bad",
        "no-such-compiler is not there",
        "apt-get install g++ (or the like), or set CXX to a C++17 compiler with OpenMP",
    )
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: str(tmp_path))
    assert "python3-dev" in machine.headers().remedy
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check = machine.cache()
    assert check.status == "bad" and "TORCHINDUCTOR_CACHE_DIR" in check.remedy


@pytest.mark.parametrize(
    ("flags", "status", "found"),
    [("fpu avx2 avx512f amx_bf16", "ok", "avx2, avx512f, amx_bf16"), ("fpu sse2", "note", "none of avx2")],
)
def test_the_cpu_is_described_by_what_our_code_uses(
    flags: str, status: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name\t: Some CPU\nflags\t\t: {flags}\n")
    monkeypatch.setattr(onednn, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    check = machine.cpu()
    assert check.status == status and check.found.startswith("Some CPU, ") and found in check.found


def test_a_capped_onednn_is_a_note_with_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "guard", lambda: onednn.Verdict.CAPPED)
    check = machine.amx()
    assert check.status == "note" and "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in check.remedy
