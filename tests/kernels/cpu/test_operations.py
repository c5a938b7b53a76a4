"""The operations in C++: when they are compiled and registered, and what runs where they are not."""

from __future__ import annotations

import itertools
import logging
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8_compile.kernels.cpu import library, operations
from fp8_compile.kernels.define_op import define
from fp8_compile.torch_internals.inductor import NoCompiler

NUMBERS = itertools.count()


def new_op(**given: Any) -> Any:
    """An operation that has no C++: 1 from the reference, 2 from the function for the CPU."""
    return define(
        f"only_for_tests_{next(NUMBERS)}(Tensor x) -> Tensor",
        lambda x: torch.full_like(x, 1.0),
        lambda x: torch.empty_like(x),
        cpu=given.get("cpu", lambda x: torch.full_like(x, 2.0)),
    )


@pytest.mark.parametrize("there", [True, False])
def test_the_function_for_the_cpu_runs_where_there_is_no_c_plus_plus(monkeypatch, there: bool) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(operations, "registered", lambda: bool(asked.append(True)) or there)
    op = new_op()
    assert [float(op(torch.zeros(()))) for _ in range(3)] == [2.0, 2.0, 2.0]
    assert len(asked) == 1, "not in every call"


def test_a_name_is_imported_when_it_is_called() -> None:
    op = new_op(cpu="fp8_compile.kernels.no_such_module:function")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        op(torch.zeros(()))


def test_a_compiler_that_fails_is_told_each_time(monkeypatch) -> None:
    def fail() -> bool:
        raise library.CompilationError("compiling the CPU kernels failed")

    monkeypatch.setattr(operations, "registered", fail)
    op = new_op()
    for _ in range(2):
        with pytest.raises(library.CompilationError, match="failed"):
            op(torch.zeros(()))


def test_without_torch_s_headers_there_is_one_warning_with_the_remedy(monkeypatch, caplog, tmp_path) -> None:
    monkeypatch.setattr(operations, "HEADER", tmp_path / "shim.h")
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        assert operations._operations.__wrapped__() is None
    (record,) = caplog.records
    assert f"expected {tmp_path / 'shim.h'}. Install a torch that has them" in record.getMessage()


def test_without_a_compiler_the_library_alone_warns(monkeypatch, caplog) -> None:
    def no_compiler() -> str:
        raise NoCompiler

    monkeypatch.setattr(operations, "cpp_compiler", no_compiler)
    monkeypatch.setattr(operations, "library", lambda: None)
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        assert operations._operations.__wrapped__() is None
    assert caplog.records == []


def test_kernels_of_another_version_are_not_called() -> None:
    assert operations.registered()
    other = library.Library(None)  # this program itself, which has none
    with pytest.raises(AssertionError, match="has no fp8_scaled_mm"):
        operations.use(other)
    codes, one = torch.ones(2, 2).to(torch.float8_e4m3fn), torch.ones(1, 1)
    y: Tensor = torch.ops.fp8_compile.scaled_mm(codes, codes, one, one, None, torch.float32)
    assert y.tolist() == [[2.0, 2.0], [2.0, 2.0]], "those that were called before still are"


FIRST_CALLS = """
import threading, torch
import fp8_compile
from fp8_compile.kernels.cpu import operations
assert operations._operations.cache_info().currsize == 0, "importing compiles nothing"
codes, one, found = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(1, 1), []
call = lambda: found.append(torch.ops.fp8_compile.scaled_mm(codes, codes.t(), one, one, None, torch.float32))
threads = [threading.Thread(target=call) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(found), all((y == 16).all() for y in found))
"""


def test_threads_that_call_first_at_the_same_time_register_once(tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_CALLS], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["8", "True"], done.stderr
    assert "verriding" not in done.stderr, "torch would say that an implementation was registered twice"
