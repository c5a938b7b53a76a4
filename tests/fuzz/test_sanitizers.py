"""A short run of ``sanitizers.py``: no C++ kernel reads or writes where it must not, or relies on what is undefined."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def sanitizers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitizers", pathlib.Path(__file__).with_name("sanitizers.py"))
    assert spec is not None and spec.loader is not None
    module = sys.modules["sanitizers"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if module.runtime() is None:
        pytest.skip("the compiler has no sanitizers")
    return module


@pytest.fixture(scope="module")
def portable(sanitizers: ModuleType) -> Any:
    """Not optimized: compiled in a quarter of the time, and no read or write is left out."""
    isa = sanitizers.instruction_sets()["portable"]
    return dataclasses.replace(isa, flags=(*isa.flags, "-O0"))


def test_random_calls_of_every_entry_point_have_no_findings(sanitizers: ModuleType, portable: Any) -> None:
    """For three seconds; to compile all kernels with sanitizers takes some ten before."""
    report = sanitizers.fuzz(portable, seconds=3, seed=0)
    assert report.findings == [], str(report)
    assert set(report.calls) == set(sanitizers.ENTRY_POINTS)
    assert min(count for name, count in report.calls.items() if name != "fp8_probe") >= 3, str(report)


def test_one_element_too_far_is_found(sanitizers: ModuleType, portable: Any) -> None:
    report = sanitizers.fuzz(portable, seconds=0, seed=0, only="one_too_far")
    assert any("heap-buffer-overflow" in finding for finding in report.findings), str(report)
