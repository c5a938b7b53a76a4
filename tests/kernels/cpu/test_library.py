"""Compiling the C++ on first use: once, safely, and with a clear error where it can't be."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._filelock import FileLock

from fp8_compile.kernels.cpu import isa, library

LOAD = "from fp8_compile.kernels.cpu.library import library; library()"


def run(cache: pathlib.Path, code: str = LOAD, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def libraries(cache: pathlib.Path) -> list[pathlib.Path]:
    return sorted((cache / "fp8_compile").glob("*.so"))


def test_two_processes_at_once_leave_one_whole_library_and_a_third_compiles_nothing(tmp_path: pathlib.Path) -> None:
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), isa.VARIABLE: "portable"}  # the quickest to compile
    both = [subprocess.Popen([sys.executable, "-c", LOAD], env=env) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    (built,) = libraries(tmp_path)
    written = built.stat().st_mtime_ns
    assert run(tmp_path, **{isa.VARIABLE: "portable"}).returncode == 0
    assert built.stat().st_mtime_ns == written


def test_of_several_processes_one_compiles_and_no_other_waits_for_ever(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = []

    def make(folder: pathlib.Path) -> pathlib.Path:
        made.append(folder)
        time.sleep(0.2)
        (folder / "file").write_text("whole")
        return folder / "file"

    def ask() -> None:
        assert library.kept("stem", ".txt", "key", make).read_text() == "whole"

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join()
    assert len(made) == 1
    (lock,) = (tmp_path / "locks").iterdir()
    monkeypatch.setattr(library, "LONGEST_WAIT", 0.1)
    library.kept("stem", ".txt", "key", make).unlink()
    with FileLock(lock):  # of one that hangs
        ask()
    assert len(made) == 2


def test_a_compiler_that_fails_is_an_error_with_its_words_and_the_remedy(tmp_path, monkeypatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="(?s)compiling the CPU kernels failed.*no such header.*set CXX"):
        library.load(str(compiler), isa.ISAS["portable"])
    assert not list((tmp_path / "cache" / "fp8_compile").iterdir()), "nothing half-made is left behind"


def test_a_cache_that_can_not_be_written_still_gives_a_library(tmp_path, monkeypatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "fp8_compile").write_text("a file where the folder should be")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert library.load("g++", isa.ISAS["portable"]).fp8_probe() == 1


def test_without_a_compiler_there_is_one_warning_with_the_remedy_and_no_library(monkeypatch, caplog) -> None:
    def no_compiler() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(library, "get_cpp_compiler", no_compiler)
    found = functools.cache(library.library.__wrapped__)
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        assert found() is None and found() is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["no C++ compiler found"]
    assert "Install g++" in caplog.text


def test_the_next_best_instructions_are_taken_where_the_best_do_not_work(monkeypatch, caplog) -> None:
    class Loaded:
        def __init__(self, works: bool) -> None:
            self.works = works

        def fp8_probe(self) -> int:
            return int(self.works)

    monkeypatch.delenv(isa.VARIABLE, raising=False)
    monkeypatch.setattr(isa, "cpu_features", lambda: isa.ISAS["amx"].needs)
    monkeypatch.setattr(library, "load", lambda compiler, one: Loaded(one.name == "avx512"))
    with caplog.at_level(logging.DEBUG, "fp8_compile"):
        assert library.library.__wrapped__().works
    assert "claims amx" in caplog.text and "claims avx512_bf16" in caplog.text

    monkeypatch.setenv(isa.VARIABLE, "amx")
    with pytest.raises(RuntimeError, match="FP8_COMPILE_CPU_ISA=amx is set, but these instructions do not work"):
        library.library.__wrapped__()


def test_a_compiler_older_than_the_cpu_gives_the_best_it_knows_and_a_warning(tmp_path, monkeypatch, caplog) -> None:
    class Loaded:
        def fp8_probe(self) -> int:
            return 1

    def load(compiler: str, one: isa.Isa) -> Loaded:
        if one.name == "amx":
            raise library.CompilationError("compiling the CPU kernels failed")
        return Loaded()

    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\ncase $* in *-mamx-tile*) exit 1;; esac\n")
    compiler.chmod(0o755)
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    monkeypatch.setattr(isa, "cpu_features", lambda: isa.ISAS["amx"].needs)
    monkeypatch.setattr(library, "get_cpp_compiler", lambda: str(compiler))
    monkeypatch.setattr(library, "load", load)
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        assert library.library.__wrapped__().isa.name == "avx512_bf16"
    assert "is too old for this CPU's amx" in caplog.text

    compiler.write_text("#!/bin/sh\n")  # knows the flags: what fails is ours, and not hidden
    with pytest.raises(library.CompilationError):
        library.library.__wrapped__()


def test_a_machine_that_grants_tiles_and_does_not_have_them_is_found_out(tmp_path: pathlib.Path) -> None:
    features = isa.cpu_features()
    if "amx_tile" in features or not isa.ISAS["avx512_bf16"].needs <= features:
        pytest.skip("shown on a CPU that has all that the AMX code needs but AMX")
    (tmp_path / "main.cpp").write_text(
        'extern "C" int fp8_probe();\n'
        'extern "C" long syscall(long, ...) { return 0; }  // the kernel\'s word that AMX may be used\n'
        "int main() { return fp8_probe(); }\n"
    )
    sources = {"scaled_mm.cpp": library.SOURCES["scaled_mm.cpp"], str(tmp_path / "main.cpp"): ()}
    command = [library.get_cpp_compiler(), *library.FLAGS, *isa.ISAS["amx"].flags]
    objects = library.compiled_objects(command, sources, tmp_path)
    library.run_compiler([[*command, *objects, "-o", str(tmp_path / "probe")]])
    assert subprocess.run([tmp_path / "probe"]).returncode == 0
