"""Compile every Triton kernel of a generated step to a cubin; no GPU is needed.

    for kernel in compile_kernels(step.forward): print(kernel.name, kernel.registers, kernel.spills)

A kernel is compiled as Inductor would at its first launch: same signature, same promises of alignment, same options,
with the block sizes that its heuristics propose, each of them. The target is the one the code was generated for.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import pathlib
import re
import tempfile
from typing import Any, Iterator
from unittest import mock

import triton
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8_compile.kernels.gpu.ahead_of_time import facts_of


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """The machine code of a kernel in one configuration."""

    name: str
    config: str  # "XBLOCK: 1, R0_BLOCK: 2048, num_warps: 16, ..."
    registers: int  # a thread
    spills: int  # loads and stores of spilled registers in the code
    cubin_bytes: int
    nan_clamps: int  # min.NaN and max.NaN, which make Triton miscompile stores of bytes (triton#11111)


def compile_kernels(source: str, *, every_config: bool = True) -> Iterator[CompiledKernel]:
    """Compile the kernels of one generated source, in order; else only the first configuration of each."""
    for name, text in kernel_sources(source).items():
        kernel = _load(name, text)
        for config in kernel.configs if every_config else kernel.configs[:1]:
            yield _compile(name, kernel, config)


def kernel_sources(source: str) -> dict[str, str]:
    """Name -> text of what the generated code hands to ``async_compile.triton('name', '''text''', ...)``."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called == "async_compile.triton":
                found[node.targets[0].id] = node.value.args[1].value
            elif called.startswith("async_compile."):
                raise ValueError(f"{called}({node.targets[0].id}) is no Triton kernel")
    return found


def _load(name: str, text: str) -> CachingAutotuner:
    """Run the text of a kernel: a decorator of Inductor's heuristics around a ``triton.jit`` function."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / f"{name}.py"  # Triton reads a kernel's source from its file
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        with mock.patch.object(triton_helpers, "set_driver_to_gpu"):  # there is none
            spec.loader.exec_module(module)
    (kernel,) = [value for value in vars(module).values() if isinstance(value, CachingAutotuner)]
    return kernel


def _compile(name: str, kernel: CachingAutotuner, config: triton.Config) -> CompiledKernel:
    meta: dict[str, Any] = kernel._create_compile_meta(config)
    source = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
    target = GPUTarget(meta["device_type"], meta["cc"], kernel.device_props.warp_size_or_default)
    compiled = triton.compile(source, target=target, options=kernel._create_compile_options(config, meta))
    facts = facts_of(compiled)
    nan_clamps = len(re.findall(r"\b(?:min|max)\S*\.NaN", compiled.asm["ptx"]))
    return CompiledKernel(name, str(config), facts.registers, facts.spills, len(compiled.asm["cubin"]), nan_clamps)
