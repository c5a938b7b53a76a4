"""The operations in C++ (``operations.cpp``), compiled on first use and registered with torch's dispatcher.

They need torch's headers and none of the CPU's instructions: one file, compiled beside the kernels (``library.py``) and
kept as they are. From then on a call of an operation on CPU tensors does not run Python. Without a compiler, or without
the headers, it runs the formula in Python that ``define_op.py`` has been given.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import logging
import pathlib
import threading

import torch

from fp8_compile.torch_internals.inductor import NoCompiler, cpp_compiler

from .compiler import compiled_objects, run_compiler, source_texts
from .kept_files import kept
from .library import Library, library

log = logging.getLogger("fp8_compile")

FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden")
TORCH = pathlib.Path(torch.__file__).parent
INCLUDE = ("-isystem", str(TORCH / "include"))
OPERATIONS = ("operations.cpp", "packed_operations.cpp", "block_operations.cpp", "cache_operations.cpp")
SOURCES = {source: INCLUDE for source in (*OPERATIONS, "torch_library.cpp")}
HEADER = TORCH / "include" / "torch" / "csrc" / "stable" / "c" / "shim.h"

_lock = threading.Lock()


def registered() -> bool:
    """True once the dispatcher has the operations; they are compiled and registered on the first call."""
    with _lock:
        return _operations() is not None


def use(kernels: Library) -> None:
    """Let the operations call other kernels than those of :func:`library`."""
    with _lock:
        _use(_operations(), kernels)


@functools.cache
def _operations() -> ctypes.CDLL | None:
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        building = beside.submit(_built)
        kernels = library()  # warns where there is no compiler
        built = building.result()
    if kernels is None or built is None:
        return None
    loaded = ctypes.CDLL(str(built))
    loaded.fp8_use_kernels.argtypes = (ctypes.c_void_p,)
    loaded.fp8_use_kernels.restype = loaded.fp8_register_operations.restype = ctypes.c_char_p
    _use(loaded, kernels)
    refused = loaded.fp8_register_operations()
    if refused is not None:
        raise RuntimeError(f"torch {torch.__version__} does not take the operation fp8_compile::{refused.decode()}")
    return loaded


def _use(loaded: ctypes.CDLL | None, kernels: Library) -> None:
    assert loaded is not None, "there are no operations without a compiler"
    missing = loaded.fp8_use_kernels(kernels._handle)
    assert missing is None, f"{kernels._name} has no {missing.decode()}"


def _built() -> pathlib.Path | None:
    """Where the compiled operations are stored; None where they can't be compiled."""
    try:
        compiler = cpp_compiler()
    except NoCompiler:
        return None
    if not HEADER.exists():
        log.warning(
            "torch's headers are not there: expected %s. Install a torch that has them, as Inductor needs them too. "
            "Until then FP8 operations on the CPU run in plain PyTorch, slowly",
            HEADER,
        )
        return None
    key = repr((source_texts(), FLAGS, SOURCES, compiler, torch.__version__))
    return kept("operations", ".so", key, functools.partial(_compile, compiler))


def _compile(compiler: str, folder: pathlib.Path) -> pathlib.Path:
    objects = compiled_objects([compiler, *FLAGS], SOURCES, folder)
    linked = folder / "operations.so"
    run_compiler([[compiler, "-shared", *objects, f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-o", str(linked)]])
    return linked
