"""The C++ kernels as something to link into a model that AOTInductor compiles.

    SHIMS      operation -> the C declaration of what the generated code calls for it     aoti_shims.cpp
    linkable() one relocatable file with the kernels of this CPU and the shims, hidden from everyone else

A package that has them needs neither Python nor anything of ours where it runs.
"""

from __future__ import annotations

import functools
import pathlib

import torch

from fp8_compile.kernels import experts, fp8_cache, fp8_weight, mxfp8
from fp8_compile.kernels.fp8_inputs import quantize_inputs_op
from fp8_compile.kernels.nvfp4.ops import mm_op
from fp8_compile.torch_internals.inductor import cpp_compiler

from .compiler import compiled_objects, run_compiler, source_texts
from .isa import Isa, cpu_features
from .kept_files import kept
from .library import FLAGS, SOURCES, working_isa
from .operations import INCLUDE, OPERATIONS
from .quantize_mm import quantize_mm_op
from .scaled_mm import scaled_mm_op

SHIMS = {
    mm_op: [
        "AOTITorchError aoti_torch_cpu_nvfp4_mm(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,"
        " AtenTensorHandle, AtenTensorHandle*, const char**, const char*, AtenTensorHandle*)"
    ],
    fp8_weight.mm_op: [
        "AOTITorchError aoti_torch_cpu_fp8_mm(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,"
        " AtenTensorHandle*, AtenTensorHandle*)"
    ],
    experts.nvfp4_mm_op: [
        "AOTITorchError aoti_torch_cpu_nvfp4_experts_mm(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,"
        " AtenTensorHandle, AtenTensorHandle, const char*, const char*, AtenTensorHandle*)"
    ],
    experts.fp8_mm_op: [
        "AOTITorchError aoti_torch_cpu_fp8_experts_mm(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,"
        " AtenTensorHandle, const char*, AtenTensorHandle*)"
    ],
    quantize_inputs_op: [
        "AOTITorchError aoti_torch_cpu_quantize_inputs(AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle*,"
        " AtenTensorHandle*)"
    ],
    scaled_mm_op: [
        "AOTITorchError aoti_torch_cpu_scaled_mm(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,"
        " AtenTensorHandle, AtenTensorHandle*, int32_t, AtenTensorHandle*)"
    ],
    mxfp8.quantize_mx_op: [
        "AOTITorchError aoti_torch_cpu_quantize_mx(AtenTensorHandle, const int64_t*, int64_t, AtenTensorHandle*,"
        " AtenTensorHandle*)"
    ],
    mxfp8.mx_mm_op: [
        "AOTITorchError aoti_torch_cpu_mx_mm(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,"
        " AtenTensorHandle*, int32_t, AtenTensorHandle*)"
    ],
    quantize_mm_op: [
        "AOTITorchError aoti_torch_cpu_quantize_mm(AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle,"
        " AtenTensorHandle*, AtenTensorHandle*, int32_t, int32_t, AtenTensorHandle*)"
    ],
    fp8_cache.quantize_op: [
        "AOTITorchError aoti_torch_cpu_fp8_cache_quantize(AtenTensorHandle, AtenTensorHandle*, AtenTensorHandle*)"
    ],
    fp8_cache.dequantize_op: [
        "AOTITorchError aoti_torch_cpu_fp8_cache_dequantize(AtenTensorHandle, AtenTensorHandle*, int32_t,"
        " AtenTensorHandle*)"
    ],
    fp8_cache.attention_op: [
        "AOTITorchError aoti_torch_cpu_fp8_attention(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle,"
        " AtenTensorHandle*, AtenTensorHandle*, AtenTensorHandle*, double, int32_t, AtenTensorHandle*)"
    ],
}
SHIM_SOURCES = {source: INCLUDE for source in (*OPERATIONS, "aoti_shims.cpp")}
# Features that code for this very CPU may use: what -march=native, as Inductor has it, turns on.
_INSTRUCTIONS = ("avx", "amx", "fma", "f16c", "bmi", "gfni", "vaes", "vpclmulqdq", "sse4", "popcnt", "movbe", "sha_ni")


def linkable() -> pathlib.Path:
    """``lib<name>.a`` for this CPU, in Inductor's cache folder; compiled on first use."""
    isa = working_isa()
    if isa is None:
        raise ValueError("export needs a C++ compiler, and none was found: install g++, or set CXX to one")
    compiler = cpp_compiler()
    flags = (*FLAGS, "-fvisibility=hidden", *isa.flags)
    key = repr((source_texts(), flags, SOURCES, SHIM_SOURCES, compiler, torch.__version__))
    return kept(f"libfp8_compile_{isa.name}", ".a", key, functools.partial(_compile, [compiler, *flags]))


def needed_features(isa: Isa | None = None) -> list[str]:
    """What a CPU must have to run code that was compiled on this one, as /proc/cpuinfo calls it."""
    isa = isa or working_isa()
    ours = isa.needs if isa else frozenset()
    return sorted({*ours, *(name for name in cpu_features() if name.startswith(_INSTRUCTIONS))})


def _compile(command: list[str], folder: pathlib.Path) -> pathlib.Path:
    """One relocatable file, which every linker takes for a library by its name: no archiver is needed."""
    objects = compiled_objects(command, {**SOURCES, **SHIM_SOURCES}, folder)
    run_compiler([[command[0], "-r", "-nostdlib", *objects, "-o", str(folder / "all.o")]])
    return folder / "all.o"
