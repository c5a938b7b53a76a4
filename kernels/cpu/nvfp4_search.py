"""The searches of GPTQ in C++, compiled on first use: scales of blocks by several ways, codes by tabu search.

They are a library of their own: a process that only multiplies need not compile what quantizes.
"""

from __future__ import annotations

import ctypes
import functools
import pathlib

import torch
from torch import Tensor

from fp8_compile.kernels.operands import ANY, FP32, check, check_at_least, check_value
from fp8_compile.torch_internals.inductor import cpp_compiler

from .compiler import compiled_objects, run_compiler, source_texts
from .isa import Isa
from .kept_files import kept
from .library import FLAGS, working_isa

SOURCES = {"nvfp4_paths.cpp": ("-ffp-contract=fast",), "nvfp4_codes.cpp": ("-ffp-contract=fast",)}


@functools.cache
def search_library() -> ctypes.CDLL | None:
    """The searches compiled for this CPU; None without a compiler, of which ``library()`` warns."""
    isa = working_isa()
    return None if isa is None else load(cpp_compiler(), isa)


def load(compiler: str, isa: Isa) -> ctypes.CDLL:
    key = repr((source_texts(), FLAGS, SOURCES, isa.flags, compiler))
    build = functools.partial(_compile, compiler, isa)
    loaded = ctypes.CDLL(str(kept(f"searches_{isa.name}", ".so", key, build)))
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    loaded.nvfp4_scale_paths.argtypes = (*(pointer,) * 3, size, size, integer, size, integer, integer, pointer, integer)
    loaded.nvfp4_code_search.argtypes = (*(pointer,) * 4, size, size, size, size, size, integer)
    loaded.nvfp4_round_block.argtypes = (pointer, pointer, size, integer, pointer, pointer, integer)
    for function in (loaded.nvfp4_scale_paths, loaded.nvfp4_code_search, loaded.nvfp4_round_block):
        function.restype = None
    return loaded


def _compile(compiler: str, isa: Isa, folder: pathlib.Path) -> pathlib.Path:
    objects = compiled_objects([compiler, *FLAGS, *isa.flags], SOURCES, folder)
    run_compiler([[compiler, "-shared", "-fopenmp", *objects, "-o", str(folder / "searches.so")]])
    return folder / "searches.so"


def scale_paths(
    kernels: ctypes.CDLL,
    weights: Tensor,
    kept_zero: Tensor,
    factor: Tensor,
    size: int,
    paths: int,
    candidates: tuple[int, int],
) -> Tensor:
    """weights: FP32 [N, K], kept_zero: bool [N, K/B], factor: FP32 [K, K] -> FP32 [N, K/B]; B is 16 or 32."""
    check("scale_paths", "weights", weights, FP32, (ANY, ANY))
    check_value("scale_paths", "size", size, (16, 32))
    rows, columns = weights.shape
    check("scale_paths", "kept_zero", kept_zero, (torch.bool,), (rows, columns // size))
    check("scale_paths", "factor", factor, FP32, (columns, columns))
    check_at_least("scale_paths", "paths", paths, 1)
    check_at_least("scale_paths", "candidates", min(candidates), 0)
    weights, kept_zero, factor = weights.contiguous(), kept_zero.contiguous(), factor.contiguous()
    found = weights.new_empty(kept_zero.shape)
    kernels.nvfp4_scale_paths(
        *(weights.data_ptr(), kept_zero.data_ptr(), factor.data_ptr(), *weights.shape, size, paths, *candidates),
        *(found.data_ptr(), torch.get_num_threads()),
    )
    return found


def code_search(
    kernels: ctypes.CDLL, levels: Tensor, scales: Tensor, gradient: Tensor, hessian: Tensor, steps: int, tenure: int
) -> Tensor:
    """levels: int8 [N, K], scales: FP32 [N, K/B], 0 where a block stays as it is; gradient: FP32 [N, K], hessian: FP32
    [K, K] -> levels."""
    check("code_search", "levels", levels, (torch.int8,), (ANY, ANY))
    rows, columns = levels.shape
    check("code_search", "scales", scales, FP32, (rows, ANY))
    check_at_least("code_search", "scales.shape[1]", scales.shape[1], 1)
    check("code_search", "gradient", gradient, FP32, (rows, columns))
    check("code_search", "hessian", hessian, FP32, (columns, columns))
    check_at_least("code_search", "tenure", tenure, 1)
    levels = levels.clone(memory_format=torch.contiguous_format)
    scales, gradient, hessian = scales.contiguous(), gradient.contiguous(), hessian.contiguous()
    kernels.nvfp4_code_search(
        *(levels.data_ptr(), scales.data_ptr(), gradient.data_ptr(), hessian.data_ptr(), rows, columns),
        *(columns // scales.shape[1], steps, tenure, torch.get_num_threads()),
    )
    return levels


def round_block(kernels: ctypes.CDLL, y: Tensor, within: Tensor, rounded: Tensor) -> Tensor:
    """y: FP32 [B, N], weights of a block by their scale, within: its part of U, [B, B] -> what rounding missed, [B, N];
    ``rounded`` [B, N] is filled with what they became. B is 16 or 32."""
    op, size = "round_block", y.shape[0]
    check(op, "y", y, FP32, (size, ANY), contiguous=True)
    check(op, "within", within, FP32, (size, size))
    check(op, "rounded", rounded, FP32, tuple(y.shape), contiguous=True)
    check_value(op, "size", size, (16, 32))
    within, missed = within.contiguous(), torch.empty_like(y)
    given = (y.data_ptr(), within.data_ptr(), y.shape[1], size, missed.data_ptr(), rounded.data_ptr())
    kernels.nvfp4_round_block(*given, torch.get_num_threads())
    return missed
