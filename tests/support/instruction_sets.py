"""The instruction sets that this machine can run, and the kernels compiled for one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator

import pytest

from fp8_compile.kernels.cpu import isa, library, operations

USED = "used"  # the best that this CPU has, with all that it wants: products and tables of bytes
# Each of the others without such extras, but emulated AMX: CPUs with AMX have them.
RUNNABLE = {one.name: one for one in isa.ISAS.values() if one.needs <= isa.cpu_features()}
if (emulated := RUNNABLE.get("amx_emulated")) is not None:
    RUNNABLE["amx_emulated"] = isa.with_wanted(emulated)
# Compiled in less than half of the time; one is compiled as users have it, and is the one that everything else runs on.
RUNNABLE = {name: dataclasses.replace(one, flags=(*one.flags, "-O1")) for name, one in RUNNABLE.items()}
RUNNABLE[USED] = isa.candidates()[0]


def kernels_for(name: str) -> library.Library:
    """The kernels with the instructions of a name in ``RUNNABLE``."""
    loaded = library.load(library.cpp_compiler(), RUNNABLE[name])
    if not loaded.fp8_probe():
        pytest.skip(f"this CPU claims {name}, but it does not work here")
    return loaded


@contextlib.contextmanager
def using(name: str) -> Iterator[library.Library]:
    """The operations call the kernels of a name in ``RUNNABLE``."""
    loaded, usual = kernels_for(name), library.library()
    assert usual is not None and operations.registered()
    operations.use(loaded)
    try:
        yield loaded
    finally:
        operations.use(usual)


def share_kernels(cache: pathlib.Path) -> None:
    """Put this process's kernels and operations into another cache folder: who uses it is spared their compilation."""
    loaded = library.library()
    assert loaded is not None and operations.registered()
    (folder := cache / "fp8_compile" / "kernels").mkdir(mode=0o700, parents=True, exist_ok=True)
    for one in (loaded, operations._operations()):
        assert one is not None
        shutil.copy(one._name, folder)
