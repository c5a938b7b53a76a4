"""``make test TORCH=2.15.0`` runs in an environment of its own; without TORCH the default one is used."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fp8_compile.torch_internals import releases

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def planned(*arguments: str) -> str:
    """What make would do, as if nothing was installed yet."""
    command = ["make", "--dry-run", "--always-make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["test", "demo"])
@pytest.mark.parametrize(
    "torch, folder",
    [(None, ".venv/"), ("2.13.0", ".venv/"), ("2.14.1", ".venv-2.14.1/"), ("2.15.0", ".venv-2.15.0/")],
)
def test_each_torch_has_an_environment_of_its_own(target: str, torch: str | None, folder: str) -> None:
    lines = planned(target, *([f"TORCH={torch}"] if torch else [])).splitlines()
    used = [line.split()[0] for line in lines if "bin/python" in line]
    assert len(used) >= 3 and all(command.startswith(folder) for command in used), used
    installs = [line for line in lines if "pip" in line]
    assert all(f"'torch=={torch or '2.13.0'}'" in line for line in installs), "nothing may replace that torch"
    triton = {"2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}[(torch or "2.13.0")[:4]]
    with_torch = f"'torch=={torch or '2.13.0'}' 'triton=={triton}.*'"
    assert installs[0].endswith(with_torch), "before anything that asks for a range"
    assert all(with_torch in line for line in installs), "nothing may replace that Triton either"


def test_the_default_torch_is_the_oldest_supported_and_help_names_the_choice() -> None:
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"without it on {releases.name_of(releases.OLDEST)}.0, in .venv." in done.stdout
    assert "TORCH=2.15.0" in done.stdout
