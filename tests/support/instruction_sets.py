"""The instruction sets that this machine can run, and the kernels compiled for one of them."""

from __future__ import annotations

import ctypes
import pathlib
import shutil

import pytest

from fp8_compile.kernels.cpu import isa, library

USED = "used"  # the best that this CPU has, with all that it wants: products and tables of bytes
# Each of the others without such extras, but emulated AMX: CPUs with AMX have them.
RUNNABLE = {one.name: one for one in isa.ISAS.values() if one.needs <= isa.cpu_features()}
if (emulated := RUNNABLE.get("amx_emulated")) is not None:
    RUNNABLE["amx_emulated"] = isa.with_wanted(emulated)
RUNNABLE[USED] = isa.candidates()[0]


def kernels_for(name: str) -> ctypes.CDLL:
    """The kernels with the instructions of a name in ``RUNNABLE``."""
    loaded = library.load(library.cpp_compiler(), RUNNABLE[name])
    if not loaded.fp8_probe():
        pytest.skip(f"this CPU claims {name}, but it does not work here")
    return loaded


def share_kernels(cache: pathlib.Path) -> None:
    """Put this process's kernels into another cache folder: who uses it is spared their compilation."""
    loaded = library.library()
    assert loaded is not None
    (folder := cache / "fp8_compile" / "kernels").mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copy(loaded._name, folder)
