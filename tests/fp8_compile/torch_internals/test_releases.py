"""Which releases of torch are supported, told from their version strings; one warning on a newer one."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from fp8_compile.torch_internals import releases
from fp8_compile.torch_internals.releases import Standing

ROOT = Path(__file__).parents[3]


def requirements() -> list[str]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


@pytest.fixture(autouse=True)
def not_yet_warned() -> Iterator[None]:
    releases.warn_of_newer_release.cache_clear()
    yield
    releases.warn_of_newer_release.cache_clear()


@pytest.mark.parametrize(
    "version, release, standing",
    [
        ("2.9.1", (2, 9), Standing.OLDER),
        ("2.13.0+cpu", (2, 13), Standing.SUPPORTED),
        ("2.14.1+cu130", (2, 14), Standing.SUPPORTED),
        ("2.15.0a0+git1234567", (2, 15), Standing.SUPPORTED),
        ("2.16.0", (2, 16), Standing.NEWER),
        ("3.0.0", (3, 0), Standing.NEWER),
    ],
)
def test_a_version_names_its_release(version: str, release: releases.Release, standing: Standing) -> None:
    assert releases.release_of(version) == release
    assert releases.standing_of(release) is standing


def test_what_is_not_a_version_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a version such as '2.15.0', got 'main'"):
        releases.release_of("main")


def test_the_tests_run_on_a_supported_torch_with_its_triton() -> None:
    assert releases.SUPPORTED[releases.torch_release()] == releases.triton_release()


def test_make_installs_the_triton_of_each_release() -> None:
    """A CPU build of torch names no Triton: without these lines a bare clone gets the newest of our range."""
    named = re.findall(r"^TRITON_([\d.]+) := triton==([\d.]+)\.\*$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {releases.release_of(torch): releases.release_of(triton) for torch, triton in named} == releases.SUPPORTED


def test_the_requirements_are_the_supported_releases() -> None:
    """``torch>=2.13,<2.16``, and Triton to match: what pip is told and what the code is told must not drift apart."""
    required = requirements()
    for package, oldest, newest in (
        ("torch", releases.OLDEST, releases.NEWEST),
        ("triton", min(releases.SUPPORTED.values()), max(releases.SUPPORTED.values())),
    ):
        (requirement,) = [line for line in required if re.match(rf"{package}\b", line)]
        after = (newest[0], newest[1] + 1)
        assert requirement.split(";")[0] == f"{package}>={releases.name_of(oldest)},<{releases.name_of(after)}"


def test_installing_the_package_would_not_change_the_torch_that_is_running() -> None:
    """The requirements, read as pip reads them, hold for the torch and the Triton that are there."""
    checked = [one for one in map(Requirement, requirements()) if one.name in ("torch", "triton")]
    assert len(checked) == 2
    for one in checked:
        assert one.specifier.contains(importlib.metadata.version(one.name), prereleases=True), one


def test_a_newer_release_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        releases.warn_of_newer_release()
        assert not caplog.records
        releases.warn_of_newer_release.cache_clear()
        monkeypatch.setattr(torch, "__version__", "2.17.0")
        releases.warn_of_newer_release()
        releases.warn_of_newer_release()
    (record,) = caplog.records
    assert record.getMessage() == (
        "torch 2.17.0 is newer than 2.15, the newest release that fp8_compile was tested with: it works as far as the "
        "self-checks hold; `fp8-compile doctor` runs them"
    )
