"""Compiling the C++ on first use: once, safely, and with a clear error where it can't be."""

from __future__ import annotations

import functools
import logging
import pathlib
import re
import subprocess

import pytest
from torch._inductor import config

from fp8_compile.kernels.cpu import isa, library
from fp8_compile.torch_internals.inductor import NoCompiler


def test_a_compiler_that_fails_is_an_error_with_its_words_and_the_remedy(tmp_path, monkeypatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="(?s)compiling the CPU kernels failed.*no such header.*set CXX"):
        library.load(str(compiler), isa.ISAS["portable"])
    left = [file.name for file in (tmp_path / "cache" / "fp8_compile" / "kernels").iterdir() if file.suffix != ".lock"]
    assert left == [], "nothing half-made is left behind"


def test_without_a_compiler_there_is_one_warning_with_the_remedy_and_no_library(monkeypatch, caplog) -> None:
    def no_compiler() -> str:
        raise NoCompiler

    monkeypatch.setattr(library, "cpp_compiler", no_compiler)
    found = functools.cache(library.library.__wrapped__)
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        assert found() is None and found() is None
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["no C++ compiler found"]
    assert "Install g++" in caplog.text


@pytest.mark.parametrize(
    "name, script, message",
    [
        ("g++ -O1", None, r"CXX='g\+\+ -O1' is a compiler with arguments: .* got g\+\+ and -O1. Set CXX=g\+\+"),
        ("failing", "#!/bin/sh\necho no licence >&2\nexit 3\n", "is there, but does not work: .*3: no licence"),
        ("garbage", "no program\0", "can't be started: .*Exec format error.*Set CXX"),
        ("no-such-compiler", None, "no C\\+\\+ compiler found: expected .*Install g"),
        ("g++ 'unbalanced", None, "no C\\+\\+ compiler found"),
    ],
)
def test_a_compiler_that_can_not_be_used_is_told_apart_from_none(
    tmp_path, caplog, name: str, script: str | None, message: str
) -> None:
    if script is not None:
        name = str(tmp_path / name)
        pathlib.Path(name).write_text(script)
        pathlib.Path(name).chmod(0o755)
    # Inductor reads CXX when it is imported.
    with config.patch({"cpp.cxx": (None, name)}), caplog.at_level(logging.WARNING, "fp8_compile"):
        assert library.library.__wrapped__() is None
    (record,) = caplog.records
    assert re.search(message, record.getMessage())
    assert "run in plain PyTorch, slowly" in record.getMessage()


def test_a_compiler_that_can_not_be_run_is_told_apart_from_none(tmp_path, caplog) -> None:
    (tmp_path / "text").write_text("not a program")
    with config.patch({"cpp.cxx": (None, str(tmp_path / "text"))}):
        assert library.library.__wrapped__() is None
    assert "is not a compiler: expected a program, got something that can't be run" in caplog.text


def test_a_compiler_that_compiles_nothing_is_not_called_too_old(tmp_path, monkeypatch, caplog) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho out of order >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "cpp_compiler", lambda: str(compiler))
    with pytest.raises(library.CompilationError, match="out of order"):
        library.library.__wrapped__()
    assert "too old" not in caplog.text


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
    monkeypatch.setattr(library, "cpp_compiler", lambda: str(compiler))
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
    command = [library.cpp_compiler(), *library.FLAGS, *isa.ISAS["amx"].flags]
    objects = library.compiled_objects(command, sources, tmp_path)
    library.run_compiler([[*command, *objects, "-o", str(tmp_path / "probe")]])
    assert subprocess.run([tmp_path / "probe"]).returncode == 0
