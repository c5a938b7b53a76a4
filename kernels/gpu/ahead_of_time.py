"""Compile a kernel for a GPU that is not there, and read from its code what it will cost.

    compiled = compile_for("cuda:90", kernel, {"x_ptr": "*bf16", "rows": "i32", ...}, {"BLOCK": 1024}, num_warps=4)
    facts    = facts_of(compiled)    registers, shared bytes, spills, 128-bit loads and stores, FP8 conversions

Pointers and integers are promised to be multiples of 16, as the JIT finds them for tensors whose sizes are
(``aligned=False``: any); what is in ``constants`` is a constexpr or an integer the JIT would have specialised to 1.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import subprocess
import tempfile
from typing import Any, Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

TARGETS = {
    "cuda:89": GPUTarget("cuda", 89, 32),  # Ada: L40, RTX 4090
    "cuda:90": GPUTarget("cuda", 90, 32),  # Hopper: H100, H200
    "cuda:100": GPUTarget("cuda", 100, 32),  # Blackwell: B200
    "cuda:120": GPUTarget("cuda", 120, 32),  # Blackwell: RTX 5090
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),  # MI300
    "hip:gfx950": GPUTarget("hip", "gfx950", 64),  # MI350
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the code says. ``spills``: bytes of a thread's stack on NVIDIA, registers on AMD."""

    registers: int  # of a thread
    shared_bytes: int
    spills: int
    wide_loads: int  # of 128 bits, from global memory
    wide_stores: int
    narrow_stores: int  # of fewer bits, to global memory
    fp8_conversions: int  # hardware instructions that make FP8


def compile_for(
    target: str,
    kernel: JITFunction,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: bool = True,
    **options: Any,
) -> CompiledKernel:
    """Compile for one of TARGETS. ``options`` are those of a launch: num_warps and the like."""
    types = {name: "constexpr" if name in constants else signature[name] for name in kernel.arg_names}
    promises = {
        (index,): [["tt.divisibility", 16]]
        for index, type in enumerate(types.values())
        if aligned and (type.startswith("*") or type in ("i32", "i64"))
    }
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, types, constexprs=constexprs, attrs=promises)
    return triton.compile(source, target=TARGETS[target], options=options)


def facts_of(compiled: CompiledKernel) -> Facts:
    """Read what the compiler made."""
    return _facts_nvidia(compiled) if "cubin" in compiled.asm else _facts_amd(compiled)


def _facts_nvidia(compiled: CompiledKernel) -> Facts:
    # From PTX, in milliseconds: ptxas neither splits nor joins these instructions, and disassembling takes a second.
    code, usage = compiled.asm["ptx"], _resource_usage(compiled.asm["cubin"])
    wide = r"(v4\.b32|v8\.b32|v2\.b64|v4\.b64)"
    return Facts(
        registers=_number(r"REG:(\d+)", usage),
        shared_bytes=compiled.metadata.shared,
        spills=sum(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", usage)),
        wide_loads=_count(rf"\bld\.global\.(\S+\.)?{wide}", code),
        wide_stores=_count(rf"\bst\.global\.(\S+\.)?{wide}", code),
        narrow_stores=_count(rf"\bst\.global\.(?!(\S+\.)?{wide})", code),
        fp8_conversions=_count(r"\bcvt\.rn\.satfinite\.(e4m3|e5m2)x2\.", code),
    )


def _facts_amd(compiled: CompiledKernel) -> Facts:
    code = compiled.asm["amdgcn"]
    return Facts(
        registers=_number(r"\.vgpr_count:\s+(\d+)", code),
        shared_bytes=compiled.metadata.shared,
        spills=sum(int(found) for found in re.findall(r"\.[vs]gpr_spill_count:\s+(\d+)", code)),
        wide_loads=_count(r"\b(global|buffer)_load_(dwordx4|b128)", code),
        wide_stores=_count(r"\b(global|buffer)_store_(dwordx4|b128)", code),
        narrow_stores=_count(r"\b(global|buffer)_store_(?!dwordx4|b128)", code),
        fp8_conversions=_count(r"\bv_cvt_\w*(fp8|bf8)_f", code),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"no {pattern} in {text[:200]}"
    return int(found[1])


def _count(pattern: str, text: str) -> int:
    return sum(1 for _ in re.finditer(pattern, text))


def _resource_usage(cubin: bytes) -> str:
    """Registers and stack of a cubin, by the cuobjdump that comes with Triton."""
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
