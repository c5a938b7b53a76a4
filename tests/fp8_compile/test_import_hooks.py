"""Something is done as soon as another library is imported."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys

import pytest

from fp8_compile.import_hooks import when_imported


def test_asking_whether_a_library_is_there_is_not_importing_it(tmp_path: pathlib.Path, monkeypatch) -> None:
    (tmp_path / "asked_for_first.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    ran: list[int] = []
    when_imported("asked_for_first", lambda: ran.append(sys.modules["asked_for_first"].value))
    for _ in range(2):
        assert importlib.util.find_spec("asked_for_first") is not None
    assert not ran
    before = len(sys.meta_path)
    importlib.import_module("asked_for_first")
    assert ran == [1] and len(sys.meta_path) == before - 1
    when_imported("asked_for_first", lambda: ran.append(2))
    assert ran == [1, 2]


def test_a_library_that_is_not_installed_is_waited_for(tmp_path: pathlib.Path, monkeypatch) -> None:
    ran: list[int] = []
    when_imported("installed_later", lambda: ran.append(1))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("installed_later")
    (tmp_path / "installed_later.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("installed_later")
    assert ran == [1]
