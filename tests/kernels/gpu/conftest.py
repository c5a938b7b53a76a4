"""What stands in for a GPU's libraries."""

from __future__ import annotations

import ctypes
import pathlib
import shutil
import subprocess

import pytest

STAND_IN = pathlib.Path(__file__).parents[2] / "support" / "cublaslt_stand_in.c"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """cuBLASLt on a CPU, with counters and faults of its own; a module's tests share them."""
    compiler = shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler to build the stand-in with")
    built = tmp_path_factory.mktemp("cublaslt") / "libcublasLt.so"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", built, STAND_IN, "-lm"], check=True)
    return ctypes.CDLL(str(built))
