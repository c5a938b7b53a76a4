"""Compile the C++ sources on first use, once a machine, and load them.

Without torch's headers that takes two seconds. The compiler is the one Inductor needs anyway; the result lies in
Inductor's cache folder under a hash of source, flags, compiler and CPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import subprocess
import tempfile

from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

SOURCE = pathlib.Path(__file__).with_name("fp8_cast.cpp")
# No contraction and no fast-math: the rounding tricks rely on every operation rounding by itself.
FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-std=c++17",
)


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library."""
    compiler = get_cpp_compiler()
    source = SOURCE.read_bytes()
    key = hashlib.sha256(repr((source, FLAGS, compiler, _cpu())).encode()).hexdigest()[:32]
    return _declared(ctypes.CDLL(str(_built(compiler, key))))


def _built(compiler: str, key: str) -> pathlib.Path:
    """Where the compiled library lies. Several processes may compile at once: each moves a whole file into place."""
    folder = pathlib.Path(cache_dir()) / "fp8_compile"
    path = folder / f"fp8_cast_{key}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _, scratch = tempfile.mkstemp(dir=folder, suffix=".so")
    except OSError:  # a cache that can't be written: compile for this process alone
        _, scratch = tempfile.mkstemp(suffix=".so")
        path = pathlib.Path(scratch)
    command = [compiler, *FLAGS, str(SOURCE), "-o", scratch]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        os.unlink(scratch)
        raise RuntimeError(
            f"compiling the CPU kernels failed: {' '.join(command)}\n{done.stderr.strip()}\n"
            "Expected a C++17 compiler with OpenMP, as Inductor needs one too; set CXX to another one"
        )
    os.replace(scratch, path)
    return path


def _cpu() -> str:
    """What -march=native depends on: a cache folder may be shared by machines."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
        return next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    except OSError:
        return platform.processor()


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    loaded.fp8_amax.argtypes = (pointer, integer, size, size, integer, pointer, integer)
    loaded.fp8_quantize.argtypes = (pointer, integer, size, size, integer, pointer, integer, integer, pointer, integer)
    loaded.fp8_decode.argtypes = (pointer, integer, size, pointer, integer)
    loaded.fp8_delayed.argtypes = (
        *(pointer, integer, size, ctypes.c_float, integer),
        *(pointer, pointer, pointer, pointer, integer),
    )
    for function in (loaded.fp8_amax, loaded.fp8_quantize, loaded.fp8_delayed, loaded.fp8_decode):
        function.restype = None
    return loaded
