"""The compiled NVFP4 kernels for what this CPU can do, built on first use as in ``library.py``.

Instruction sets, best first; FP8_COMPILE_CPU_ISA (amx, avx512_bf16, avx512, avx2 or portable) caps the choice.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import subprocess
import tempfile

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

SOURCES = tuple(pathlib.Path(__file__).with_name(name) for name in ("nvfp4.cpp", "nvfp4_gemm.h", "nvfp4_lanes.h"))
FLAGS = ("-O3", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-std=c++17")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c")
ISA_FLAGS = {
    "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "portable": (),
}
_CAPS = {"amx": "avx512_bf16", "avx512": "avx512_vnni"}  # the best of ISA_FLAGS that each allows, if not itself


@functools.cache
def usable() -> tuple[str, ...]:
    """The instruction sets that this CPU has, best first."""
    has = torch.cpu
    checks = {
        "avx512_bf16": has._is_avx512_bf16_supported() and has._is_vnni_supported(),
        "avx512_vnni": has._is_avx512_supported() and has._is_vnni_supported(),
        "avx512": has._is_avx512_supported(),
        "avx2": has._is_avx2_supported(),
        "portable": True,
    }
    return tuple(isa for isa, present in checks.items() if present)


def chosen() -> str:
    """The best one that FP8_COMPILE_CPU_ISA allows."""
    asked = os.environ.get("FP8_COMPILE_CPU_ISA")
    if asked is None:
        return usable()[0]
    order = tuple(ISA_FLAGS)
    cap = _CAPS.get(asked, asked)
    if cap not in order:
        raise ValueError(
            f"FP8_COMPILE_CPU_ISA={asked} is none of the instruction sets amx, avx512_bf16, avx512, avx2, portable"
        )
    return next(isa for isa in usable() if order.index(isa) >= order.index(cap))


@functools.cache
def library(isa: str | None = None) -> ctypes.CDLL:
    """The loaded library, for one instruction set or the chosen one."""
    isa = isa or chosen()
    compiler = get_cpp_compiler()
    flags = (*FLAGS, *ISA_FLAGS[isa])
    texts = tuple(source.read_bytes() for source in SOURCES)
    key = hashlib.sha256(repr((texts, flags, compiler)).encode()).hexdigest()[:32]
    loaded = ctypes.CDLL(str(_built(compiler, flags, f"nvfp4_{isa}_{key}.so")))
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    loaded.nvfp4_matmul.argtypes = (
        *(pointer, size, size, size, integer, pointer, pointer, size, size, ctypes.c_float),
        *(pointer, integer, integer, pointer, integer),
    )
    loaded.nvfp4_matmul.restype = None
    return loaded


def _built(compiler: str, flags: tuple[str, ...], name: str) -> pathlib.Path:
    folder = pathlib.Path(cache_dir()) / "fp8_compile"
    path = folder / name
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _, scratch = tempfile.mkstemp(dir=folder, suffix=".so")
    except OSError:  # a cache that can't be written: compile for this process alone
        _, scratch = tempfile.mkstemp(suffix=".so")
        path = pathlib.Path(scratch)
    command = [compiler, *flags, str(SOURCES[0]), "-o", scratch]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        os.unlink(scratch)
        raise RuntimeError(
            f"compiling the CPU kernels failed: {' '.join(command)}\n{done.stderr.strip()}\n"
            "Expected a C++17 compiler with OpenMP, as Inductor needs one too; set CXX to another one"
        )
    os.replace(scratch, path)
    return path
