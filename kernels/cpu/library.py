"""Compile the C++ sources on first use, once per machine, and load them.

Without torch's headers that takes seconds. The compiler is the one Inductor needs anyway (``compiler.py``). The result
is kept under a hash of sources, flags and compiler (``kept_files.py``), one file per instruction set (``isa.py``).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import pathlib

from fp8_compile.torch_internals.inductor import NoCompiler, cpp_compiler

from .compiler import (
    CompilationError,
    compiled_objects,
    is_too_old,
    run_compiler,
    source_texts,
    why_none,
)
from .isa import VARIABLE, Isa, candidates
from .kept_files import kept

log = logging.getLogger("fp8_compile")

FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fno-trapping-math", "-fno-math-errno")
# Rounding tricks rely on every operation rounding by itself; in a gemm a product and a sum are one instruction.
SOURCES = {
    "fp8_cast.cpp": ("-ffp-contract=off",),
    "update_scales.cpp": ("-ffp-contract=off",),
    "fingerprint.cpp": (),
    "scaled_mm.cpp": ("-ffp-contract=fast",),
    "mx_mm.cpp": ("-ffp-contract=fast",),
    "mx_cast.cpp": ("-ffp-contract=off",),
    "nvfp4_train_mm.cpp": ("-ffp-contract=fast",),
    "nvfp4_train_cast.cpp": ("-ffp-contract=off",),
    "fp8_weight.cpp": ("-ffp-contract=fast",),
    "nvfp4.cpp": ("-ffp-contract=off",),
    "nvfp4_prefill.cpp": ("-ffp-contract=fast",),
    "experts.cpp": (),
    "fp8_attention.cpp": ("-ffp-contract=fast",),
    "fp8_cache.cpp": ("-ffp-contract=off",),
}


class Library(ctypes.CDLL):
    """The compiled kernels."""

    isa: Isa | None = None  # what they were compiled for, once that is known to work


@functools.cache
def library() -> Library | None:
    """The kernels for this CPU, or None, with one warning, if no compiler works."""
    try:
        compiler = cpp_compiler()
    except NoCompiler:
        log.warning("%s. Until then FP8 matmuls on the CPU run in plain PyTorch, slowly", why_none())
        return None
    isas = candidates()
    for isa in isas:
        try:
            loaded = load(compiler, isa)
        except CompilationError:
            if isa is isas[-1] or not is_too_old(compiler, isa):
                raise
            log.warning("%s is too old for this CPU's %s: FP8 matmuls are slower than need be", compiler, isa.name)
            continue
        if loaded.fp8_probe():
            log.debug("CPU kernels use %s", isa.name)
            loaded.isa = isa
            return loaded
        log.debug("this machine claims %s, but its instructions do not work here", isa.name)
    raise RuntimeError(
        f"{VARIABLE}={isas[0].name} is set, but these instructions do not work on this machine; unset it to let the "
        "best that work be found"
    )


def working_isa() -> Isa | None:
    """The instruction set that ``library()`` was compiled for."""
    found = library()
    return None if found is None else found.isa


def load(compiler: str, isa: Isa) -> Library:
    """The kernels compiled for an instruction set."""
    return _declared(Library(str(_built(compiler, isa))))


def _built(compiler: str, isa: Isa) -> pathlib.Path:
    """Where the compiled library is stored."""
    key = repr((source_texts(), FLAGS, SOURCES, isa.flags, compiler))
    return kept(f"kernels_{isa.name}", ".so", key, functools.partial(_compile, compiler, isa))


def _compile(compiler: str, isa: Isa, folder: pathlib.Path) -> pathlib.Path:
    objects = compiled_objects([compiler, *FLAGS, *isa.flags], SOURCES, folder)
    run_compiler([[compiler, "-shared", "-fopenmp", *objects, "-o", str(folder / "kernels.so")]])
    return folder / "kernels.so"


def _declared(loaded: Library) -> Library:
    """With the types of kernels.h for what Python calls; ``operations.py`` calls the rest."""
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    operand = (pointer, size, size, integer, pointer, size, size, size)
    loaded.fp8_scaled_mm.argtypes = (
        *(size, size, size, *operand, *operand),
        *(pointer, pointer, integer, size, integer, integer),
    )
    loaded.fp8_fingerprints.argtypes = (size, pointer, pointer, pointer, pointer)
    loaded.fp8_scaled_mm.restype = loaded.fp8_fingerprints.restype = None
    return loaded
