"""The gemms of ``cublaslt.py`` in one call of C++ per gemm, which remembers the plans: ``cublaslt.cpp``.

It is compiled on first use and kept like the CPU kernels, needs neither CUDA's headers nor torch's, and asks the open
library for its functions. ``fastest(library)`` is what to use: without a compiler it goes the way of ``cublaslt.py``.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import pathlib

import torch

from fp8_compile.kernels.cpu.compiler import CompilationError, run_compiler, why_none
from fp8_compile.kernels.cpu.kept_files import kept
from fp8_compile.torch_internals.inductor import NoCompiler, cpp_compiler

from . import cublaslt
from .cublaslt import (
    DATA_TYPES,
    LEAST_WORKSPACE_BYTES,
    SCALE_MODES,
    CublasLt,
    CublasLtError,
    Gemm,
    betas,
    in_a_byte,
    no_kernel,
)

log = logging.getLogger("fp8_compile")

SOURCE = pathlib.Path(__file__).with_name("cublaslt.cpp")
FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared")
REFUSED, NO_KERNEL = -1, -2


class CompiledCublasLt:
    """One handle of the library, as ``CublasLt``."""

    def __init__(self, library: ctypes.CDLL, compiled: ctypes.CDLL) -> None:
        self._library, self._refusal = library, compiled.fp8_cublaslt_refusal
        self._multiply = compiled.fp8_cublaslt_multiply
        self._handle = compiled.fp8_cublaslt_open(library._handle, cublaslt.MOST_PLANS)
        # The most that a gemm has needed so far. Each one gets as much, from torch's allocator: memory that is kept
        # would have to be one for each stream, and would be missing from the pool of a CUDA graph.
        self._workspace_bytes = LEAST_WORKSPACE_BYTES
        if not self._handle:
            raise CublasLtError(self._refusal().decode())

    def multiply(self, gemm: Gemm, *, stream: int) -> None:
        """Compute a gemm."""
        left, right, scale_left, scale_right, bias, c, d, fast_accumulation, alpha = gemm
        size = self._workspace_bytes
        workspace = left.new_empty(size)  # an element is a byte
        (rows, inner), each = left.shape, in_a_byte(left.dtype)
        bias_at, bias_type = (None, 0) if bias is None else (bias.data_ptr(), DATA_TYPES[bias.dtype])
        c_at, c_stride, c_type = (None, 0, 0) if c is None else (c.data_ptr(), c.stride()[0], DATA_TYPES[c.dtype])
        alpha_at, beta_at = None, None
        if alpha is not None:
            alpha_at, beta_at = alpha.data_ptr(), betas(d.device)[int(c is not None)].data_ptr()
        (left_stride, left_k), (right_k, right_stride) = left.stride(), right.stride()
        if each > 1:  # K is contiguous
            left_stride, right_stride = each * left_stride, each * right_stride
        status = self._multiply(
            *(self._handle, rows, d.shape[1], each * inner),
            *(left.data_ptr(), left_stride, left_k, DATA_TYPES[left.dtype]),
            *(right.data_ptr(), right_k, right_stride, DATA_TYPES[right.dtype]),
            scale_left.data_ptr(),
            scale_right.data_ptr(),
            *(bias_at, bias_type, c_at, c_stride, c_type),
            d.data_ptr(),
            d.stride()[0],
            DATA_TYPES[d.dtype],
            *(fast_accumulation, SCALE_MODES[scale_left.dtype], alpha_at, beta_at, workspace.data_ptr(), size, stream),
        )
        if status > 0:
            self._workspace_bytes = max(self._workspace_bytes, status)
            return self.multiply(gemm, stream=stream)
        if status == NO_KERNEL:
            raise no_kernel(gemm)
        if status:
            raise CublasLtError(self._refusal().decode())


def fastest(library: ctypes.CDLL) -> CublasLt | CompiledCublasLt:
    """A handle of cuBLASLt: in C++, or in Python where there is no compiler that works."""
    compiled = _compiled()
    return CublasLt(library) if compiled is None else CompiledCublasLt(library, compiled)


@functools.cache
def _compiled() -> ctypes.CDLL | None:
    """``cublaslt.cpp``, or None with one warning if no compiler works."""
    try:
        return load(cpp_compiler())
    except NoCompiler:
        problem = why_none()
    except CompilationError as error:
        problem = str(error)
    log.warning("%s. Until then a gemm of cuBLASLt takes twice the host time", problem)
    return None


def load(compiler: str) -> ctypes.CDLL:
    """``cublaslt.cpp`` compiled, with the types of its functions."""
    command = [compiler, *FLAGS, *_macros(), str(SOURCE), "-ldl"]
    key = repr((SOURCE.read_bytes(), command))
    loaded = ctypes.CDLL(str(kept("cublaslt", ".so", key, functools.partial(_compile, command))))
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    operand, added = (pointer, size, size, integer), (pointer, size, integer)
    loaded.fp8_cublaslt_open.argtypes, loaded.fp8_cublaslt_open.restype = (pointer, size), pointer
    loaded.fp8_cublaslt_refusal.argtypes, loaded.fp8_cublaslt_refusal.restype = (), ctypes.c_char_p
    loaded.fp8_cublaslt_multiply.argtypes = (
        *(pointer, size, size, size, *operand, *operand, pointer, pointer, pointer, integer, *added, *added),
        *(integer, integer, pointer, pointer, pointer, size, pointer),
    )
    loaded.fp8_cublaslt_multiply.restype = size
    return loaded


def _macros() -> list[str]:
    """The numbers of ``cublaslt.py`` that the source needs."""
    numbers = {name: value for name, value in vars(cublaslt).items() if name.isupper() and isinstance(value, int)}
    numbers |= {"TYPE_32F": DATA_TYPES[torch.float32], "PREF_MIN_ALIGNMENT": cublaslt.PREF_MIN_ALIGNMENT[0]}
    numbers |= {"REFUSED": REFUSED, "NO_KERNEL": NO_KERNEL}
    del numbers["MOST_PLANS"]  # an argument
    return [f"-D{name}={value}" for name, value in sorted(numbers.items())]


def _compile(command: list[str], folder: pathlib.Path) -> pathlib.Path:
    made = folder / "cublaslt.so"
    run_compiler([[*command, "-o", str(made)]])
    return made
