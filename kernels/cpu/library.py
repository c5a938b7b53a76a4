"""Compile the C++ sources on first use, once a machine, and load them.

Without torch's headers that takes seconds. The compiler is the one Inductor needs anyway; the result lies in Inductor's
cache folder under a hash of sources, flags and compiler, one file an instruction set (``isa.py``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Callable, Iterator, Mapping

from .isa import VARIABLE, Isa, candidates

log = logging.getLogger("fp8_compile")

FOLDER = pathlib.Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-fno-trapping-math", "-fno-math-errno")
# Rounding tricks rely on every operation rounding by itself; in a gemm a product and a sum are one instruction.
SOURCES = {
    "fp8_cast.cpp": ("-ffp-contract=off",),
    "update_scales.cpp": ("-ffp-contract=off",),
    "fingerprint.cpp": (),
    "scaled_mm.cpp": ("-ffp-contract=fast",),
    "fp8_weight.cpp": ("-ffp-contract=fast",),
    "nvfp4.cpp": ("-ffp-contract=off",),
    "nvfp4_prefill.cpp": ("-ffp-contract=fast",),
    "experts.cpp": (),
}
LONGEST_WAIT = 300  # seconds for another process that compiles


class CompilationError(RuntimeError):
    """The compiler is there, but does not compile our sources."""


def get_cpp_compiler() -> str:
    """The one that Inductor uses."""
    from torch._inductor import cpp_builder  # it takes seconds, which who loads a package need not spend

    return cpp_builder.get_cpp_compiler()


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels for this CPU, or None, with a warning once, where there is no compiler."""
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler:
        log.warning(
            "no C++ compiler found: FP8 matmuls on the CPU run in plain PyTorch, slowly. "
            "Install g++ or set CXX, as Inductor needs one too"
        )
        return None
    isas = candidates()
    for isa in isas:
        try:
            loaded = load(compiler, isa)
        except CompilationError:
            if isa is isas[-1] or takes_flags(compiler, isa):
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


def load(compiler: str, isa: Isa) -> ctypes.CDLL:
    """The kernels compiled for an instruction set."""
    return _declared(ctypes.CDLL(str(_built(compiler, isa))))


def takes_flags(compiler: str, isa: Isa) -> bool:
    """Whether the compiler has heard of these instructions."""
    command = [compiler, *isa.flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def source_texts() -> list[tuple[str, bytes]]:
    """Every C++ file of ours: compiled code is kept under a hash of them."""
    return [(file.name, file.read_bytes()) for file in sorted(FOLDER.iterdir()) if file.suffix in (".cpp", ".h")]


def _built(compiler: str, isa: Isa) -> pathlib.Path:
    """Where the compiled library lies."""
    key = repr((source_texts(), FLAGS, SOURCES, isa.flags, compiler))
    return kept(f"kernels_{isa.name}", ".so", key, functools.partial(_compile, compiler, isa))


def kept(stem: str, suffix: str, key: str, make: Callable[[pathlib.Path], pathlib.Path]) -> pathlib.Path:
    """``<stem>_<hash of key><suffix>`` in Inductor's cache folder; made where it is not there yet.

    ``make(folder)`` writes it somewhere in an empty folder, from where the whole file is moved into place. Of several
    processes one makes it while the others wait. A cache that can't be written gives a file for this process alone.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = pathlib.Path(cache_dir()) / "fp8_compile"
    path = folder / f"{stem}_{hashlib.sha256(key.encode()).hexdigest()[:32]}{suffix}"
    if path.exists():
        return path
    with _one_process_at_a_time(pathlib.Path(cache_dir()) / "locks" / f"{path.name}.lock"):
        if path.exists():
            return path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            scratch = pathlib.Path(tempfile.mkdtemp(dir=folder))
        except OSError:
            scratch = pathlib.Path(tempfile.mkdtemp())
            path = pathlib.Path(tempfile.mkdtemp()) / path.name
        try:
            os.replace(make(scratch), path)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return path


@contextlib.contextmanager
def _one_process_at_a_time(file: pathlib.Path) -> Iterator[None]:
    """A lock, or none where there can't be one or who has it comes to no end: then each process does what it is for."""
    from torch.utils._filelock import FileLock

    lock = FileLock(file, timeout=LONGEST_WAIT)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError):  # a timeout is an OSError, too
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _compile(compiler: str, isa: Isa, folder: pathlib.Path) -> pathlib.Path:
    objects = compiled_objects([compiler, *FLAGS, *isa.flags], SOURCES, folder)
    run_compiler([[compiler, "-shared", "-fopenmp", *objects, "-o", str(folder / "kernels.so")]])
    return folder / "kernels.so"


def compiled_objects(command: list[str], sources: Mapping[str, tuple[str, ...]], folder: pathlib.Path) -> list[str]:
    """An object file in ``folder`` of each source, with its own flags behind the command's; compiled side by side."""
    objects = {source: str(folder / f"{source}.o") for source in sources}
    run_compiler(
        [[*command, *flags, "-c", str(FOLDER / source), "-o", objects[source]] for source, flags in sources.items()]
    )
    return list(objects.values())


def run_compiler(commands: list[list[str]]) -> None:
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    errors = [process.communicate()[1] for process in running]
    for command, process, error in zip(commands, running, errors):
        if process.returncode:
            raise CompilationError(
                f"compiling the CPU kernels failed: {' '.join(command)}\n{error.strip()}\n"
                "Expected a C++17 compiler with OpenMP, as Inductor needs one too; set CXX to another one"
            )


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    loaded.fp8_amax.argtypes = (pointer, integer, size, size, integer, pointer, integer)
    loaded.fp8_quantize.argtypes = (pointer, integer, size, size, integer, pointer, integer, pointer, integer)
    loaded.fp8_inputs.argtypes = (pointer, integer, size, size, size, pointer, pointer, pointer, integer)
    loaded.fp8_delayed.argtypes = (pointer, integer, size, integer, pointer, pointer, pointer, integer)
    loaded.fp8_update_scales.argtypes = (
        *(size, size, pointer, pointer, pointer, pointer, pointer),
        *(ctypes.c_float, ctypes.c_float, ctypes.c_float, integer, integer, integer),
    )
    operand = (pointer, size, size, integer, pointer, size, size, size)
    loaded.fp8_scaled_mm.argtypes = (
        *(size, size, size, *operand, *operand),
        *(pointer, pointer, integer, size, integer, integer),
    )
    loaded.fp8_scaled_grouped_mm.argtypes = (
        *(integer, size, pointer, size, size, size),
        *(pointer, size, size, integer, pointer, size),
        *(pointer, size, size, size, integer, pointer, size, size),
        *(pointer, integer, size, size, integer),
    )
    loaded.nvfp4_matmul.argtypes = (
        *(pointer, size, size, size, integer, pointer, pointer, size, size, ctypes.c_float),
        *(pointer, integer, integer, pointer, integer),
    )
    loaded.fp8_weight_mm.argtypes = (
        *(pointer, size, size, size, integer, pointer, pointer, size, pointer, pointer, integer),
    )
    stack = (pointer, size, size, size, integer, pointer, pointer)
    loaded.nvfp4_experts.argtypes = (*stack, pointer, size, size, size, pointer, integer, pointer, integer)
    loaded.fp8_experts.argtypes = (*stack, size, size, pointer, integer, pointer, integer)
    loaded.fp8_fingerprints.argtypes = (size, pointer, pointer, pointer, pointer)
    on_fp8 = ("scaled_mm", "scaled_grouped_mm", "weight_mm", "update_scales", "fingerprints")
    for name in ("amax", "quantize", "inputs", "delayed", *on_fp8):
        getattr(loaded, f"fp8_{name}").restype = None
    loaded.nvfp4_matmul.restype = None
    loaded.nvfp4_experts.restype = loaded.fp8_experts.restype = integer
    return loaded
