"""A short run of the fuzzer of files, and that it would find what it looks for."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Any, Iterator

import pytest


@pytest.fixture
def files() -> Iterator[ModuleType]:
    """``tests/fuzz/files.py``: no test folder is on sys.path."""
    path = pathlib.Path(__file__).with_name("files.py")
    spec = importlib.util.spec_from_file_location("fuzz_files", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_files"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz_files"]


def test_readers_refuse_mutated_files_in_words_or_read_them(files: ModuleType) -> None:
    counts, failures = files.run(seconds=6)
    assert failures == []
    assert {kind for kind, _ in counts} == set(files.KINDS)
    assert sum(count for (_, outcome), count in counts.items() if outcome != "read") > 30, "mutations do damage"


@pytest.mark.parametrize("wrong", ["another error", "no message", "a hang", "cut and read"])
def test_a_reader_that_does_otherwise_would_be_found(
    wrong: str, files: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = b'{"key": [1, 2, 3]}\n'

    def read(folder: pathlib.Path) -> Any:
        if (folder / "one.json").read_bytes() == valid or wrong == "cut and read":
            return
        if wrong == "a hang":
            while True:
                pass
        raise KeyError("key") if wrong == "another error" else ValueError

    def write(folder: pathlib.Path) -> None:
        folder.mkdir(parents=True)
        (folder / "one.json").write_bytes(valid)

    monkeypatch.setattr(files, "KINDS", {"one": files.Kind(write, read, ("one.json",), whole=True)})
    monkeypatch.setattr(files, "HANG_SECONDS", 0.2)
    _, failures = files.run(seconds=20, most_failures=1)
    said = {"another error": "KeyError", "no message": "without a message", "a hang": "Hang"}
    said["cut and read"] = "cut short"
    assert any(said[wrong] in failure for failure in failures), failures
