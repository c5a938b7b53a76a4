"""A release: one version, a wheel and an sdist that are complete, and import paths that documents have named."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import fp8_compile

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
# Folder of the repository -> where a wheel has it.
PLACES = {"fp8_compile": "fp8_compile", "passes": "fp8_compile/passes", "kernels": "fp8_compile/kernels"}
SHIPPED = {".py", ".cpp", ".h", ".js", ".css", ".html", ".typed"}
# Module paths that a document has told users to import, by the version that did so.
DOCUMENTED = {
    "fp8_compile.hugging_face": "Fp8Callback",
    "fp8_compile.lightning": "Fp8Callback",
    "fp8_compile.sharded_checkpoint": "load_scaling_state",  # 0.1
    "fp8_compile.scaling.distributed_checkpoint": "load_scaling_state",  # 0.2
    "fp8_compile.config": "Config",
    "fp8_compile.target": "Target",
}


def sources() -> list[Path]:
    """Every file that an installed package needs, relative to the repository."""
    found = [file for folder in PLACES for file in (ROOT / folder).rglob("*") if file.suffix in SHIPPED]
    return sorted(file.relative_to(ROOT) for file in found)


def in_wheel(source: Path) -> str:
    folder, *inner = source.parts
    return "/".join([PLACES[folder], *inner])


@pytest.fixture(scope="module")
def clean_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a release is made of. setuptools builds in place and would leave a folder in the repository."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*map(str, sources()), "pyproject.toml", "README.md", "LICENSE"):
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return tree


def build(tree: Path, kind: str) -> Path:
    """Build a wheel or an sdist as pip would, with the setuptools that is installed: nothing is downloaded."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tree / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(clean_tree: Path) -> Path:
    return build(clean_tree, "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as users without a wheel do it: what the sdist lacks, the wheel lacks too."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build(next(folder.iterdir()), "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a folder of its own: for a wheel of Python alone, installing is unpacking."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run_installed(folder: Path, code: str) -> str:
    """Run code that sees the wheel, and torch from this environment, but not the repository."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_version_is_the_same_everywhere() -> None:
    assert fp8_compile.__version__ == VERSION
    assert (ROOT / "CHANGELOG.md").read_text().split("## ")[1].startswith(f"{VERSION} ")


def test_the_sdist_has_every_source(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    assert {str(source) for source in sources()} - names == set()
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names


def test_the_wheel_has_every_source_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == {in_wheel(source) for source in sources()}


def test_the_wheel_is_typed_and_installs_one_top_level_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        top_level = next(name for name in names if name.endswith("top_level.txt"))
        assert archive.read(top_level).decode().split() == ["fp8_compile"]
    assert "fp8_compile/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"fp8_compile", f"fp8_compile-{VERSION}.dist-info"}


def test_the_wheel_declares_the_backend_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        dist_info = f"fp8_compile-{VERSION}.dist-info"
        entry_points = archive.read(f"{dist_info}/entry_points.txt").decode()
        metadata = archive.read(f"{dist_info}/METADATA").decode()
    assert "[torch_dynamo_backends]\nfp8 = fp8_compile.backend:fp8" in entry_points
    assert "[console_scripts]\nfp8-compile = fp8_compile.cli.command:main" in entry_points
    assert f"Version: {VERSION}\n" in metadata
    assert "Requires-Dist: torch" in metadata


def test_the_installed_wheel_compiles_a_model_without_the_repository(installed: Path) -> None:
    code = f"""
import importlib.metadata, pathlib, torch, fp8_compile
assert fp8_compile.__version__ == importlib.metadata.version("fp8_compile") == {VERSION!r}
entry = next(one for one in importlib.metadata.entry_points(group="torch_dynamo_backends") if one.name == "fp8")
entry.load()
print(fp8_compile.explain(torch.nn.Linear(32, 32), args=(torch.randn(16, 32),)).summary())
print(pathlib.Path(fp8_compile.__file__).parent.parent)
"""
    summary, place = run_installed(installed, code).splitlines()
    assert summary.startswith("rewrote 2 of 2 matmuls")
    assert Path(place) == installed


def test_the_installed_command_runs(installed: Path) -> None:
    code = "from fp8_compile.cli.command import main; main(['--version'])"
    assert run_installed(installed, code) == f"fp8_compile {VERSION}"


@pytest.mark.parametrize("module, name", DOCUMENTED.items())
def test_import_paths_that_documents_have_named_keep_working(module: str, name: str) -> None:
    if module == "fp8_compile.lightning":
        pytest.importorskip("lightning", reason="lightning is not installed")
    if module == "fp8_compile.hugging_face":
        pytest.importorskip("accelerate", reason="accelerate is not installed")
    assert callable(getattr(importlib.import_module(module), name))


def test_the_old_path_of_the_distributed_checkpoint_is_the_same_function() -> None:
    from fp8_compile.scaling.distributed_checkpoint import load_scaling_state
    from fp8_compile.sharded_checkpoint import load_scaling_state as old

    assert old is load_scaling_state
