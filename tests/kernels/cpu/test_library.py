"""Compiling the C++ on first use: once, safely, and with a clear error where it can't be."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from fp8_compile.kernels.cpu import library

LOAD = "from fp8_compile.kernels.cpu.library import library; library()"


def run(cache: pathlib.Path, code: str = LOAD, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def libraries(cache: pathlib.Path) -> list[pathlib.Path]:
    return sorted((cache / "fp8_compile").glob("*.so"))


def test_two_processes_at_once_leave_one_whole_library_and_a_third_compiles_nothing(tmp_path: pathlib.Path) -> None:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    both = [subprocess.Popen([sys.executable, "-c", LOAD], env=env) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    (built,) = libraries(tmp_path)
    written = built.stat().st_mtime_ns
    assert run(tmp_path).returncode == 0
    assert built.stat().st_mtime_ns == written


def test_a_compiler_that_fails_is_an_error_with_its_words_and_the_remedy(tmp_path, monkeypatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="(?s)compiling the CPU kernels failed.*no such header.*set CXX"):
        library._built(str(compiler), "key")
    assert not libraries(tmp_path / "cache"), "nothing half-made is left behind"


def test_a_cache_that_can_not_be_written_still_gives_a_library(tmp_path, monkeypatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "fp8_compile").write_text("a file where the folder should be")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    path = library._built("g++", "key")
    assert path.exists() and path.parent != tmp_path / "cache" / "fp8_compile"
    path.unlink()
