"""What this machine can do, tried out rather than read off: the checks behind ``fp8-compile doctor``."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from typing import Callable, Literal

import torch

from fp8_compile.torch_internals import onednn, releases
from fp8_compile.torch_internals.inductor import NoCompiler, cache_folder, cpp_compiler

Status = Literal["ok", "note", "bad"]
# Flags of /proc/cpuinfo that our kernels and Inductor's code make use of, the best last.
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the doctor's answer."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def examine(*, compile_a_model: bool = False) -> list[Check]:
    """All checks in order; one that breaks is red with what it broke of."""
    tried: list[Callable[[], Check]] = [
        python, pytorch, triton, cpu, amx, bf16, compiler, headers, cpu_kernels, cache, gpu
    ]  # fmt: skip
    if compile_a_model:
        tried.append(whole)
    return [_tried(check) for check in tried]


def _tried(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a check that can't run is an answer, too
        return Check(check.__name__.replace("_", " "), "bad", f"{type(error).__name__}: {error}".strip())


def python() -> Check:
    return Check("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def pytorch() -> Check:
    version = str(torch.__version__)
    standing = releases.standing_of(releases.torch_release())
    wanted = f"torch>={releases.name_of(releases.OLDEST)}, up to {releases.name_of(releases.NEWEST)}"
    if standing is releases.Standing.OLDER:
        remedy = f"pip install 'torch=={releases.name_of(releases.NEWEST)}.*': the passes rely on internals of {wanted}"
        return Check("torch", "bad", version, remedy)
    if standing is releases.Standing.NEWER:
        return Check("torch", "note", version, f"{standing.value}; tested with {wanted}")
    return Check("torch", "ok", version)


def triton() -> Check:
    wanted = releases.SUPPORTED.get(releases.torch_release())
    named = f"triton=={releases.name_of(wanted)}.*" if wanted else "triton"
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        status: Status = "bad" if torch.cuda.is_available() else "note"
        return Check("triton", status, "not installed", f"pip install '{named}'; code for GPUs needs it")
    if wanted and releases.release_of(version) != wanted:
        goes_with = f"it goes with torch {releases.name_of(releases.torch_release())}"
        return Check("triton", "bad", version, f"pip install '{named}': {goes_with}")
    return Check("triton", "ok", version)


def cpu() -> Check:
    parts = [line.partition(":") for line in _cpuinfo().splitlines() if ":" in line]
    fields = {name.strip(): value.strip() for name, _, value in parts}  # the last processor stands for all
    flags = [flag for flag in CPU_FLAGS if flag in fields.get("flags", "").split()]
    model = fields.get("model name") or platform.processor() or platform.machine()
    found = f"{model}, {os.cpu_count()} cores: {', '.join(flags) or 'none of ' + ', '.join(CPU_FLAGS)}"
    if flags or platform.machine() not in ("x86_64", "AMD64"):
        return Check("CPU", "ok", found)
    return Check("CPU", "note", found, "without AVX2 the CPU kernels run scalar code: slow, but correct")


def _cpuinfo() -> str:
    try:
        return onednn.CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def amx() -> Check:
    """The probe of oneDNN's AMX path; it runs once a machine, in a process of its own."""
    verdict = onednn.guard()
    name = "oneDNN and AMX"
    if verdict is onednn.Verdict.CAPPED:
        remedy = f"export {onednn.CAP_VARIABLE}={onednn.CAP} for scripts that multiply before they import fp8_compile"
        return Check(name, "note", verdict.value, remedy)
    if verdict is onednn.Verdict.UNKNOWN:
        remedy = f"if a bf16 matmul dies with SIGILL: export {onednn.CAP_VARIABLE}={onednn.CAP}"
        return Check(name, "note", verdict.value, remedy)
    return Check(name, "ok", verdict.value)


def bf16() -> Check:
    """A product in a process of its own: bad code would kill this one."""
    command = [sys.executable, *onednn.PROBE_COMMAND[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=onednn.PROBE_TIMEOUT_SECONDS)
    if done.returncode:
        remedy = f"export {onednn.CAP_VARIABLE}={onednn.CAP}"
        return Check("bf16 and fp16 matmul", "bad", f"died with code {done.returncode}", remedy)
    return Check("bf16 and fp16 matmul", "ok", "exact")


def compiler() -> Check:
    remedy = "apt-get install g++ (or the like), or set CXX to a C++17 compiler with OpenMP"
    try:
        path = cpp_compiler()
    except NoCompiler as error:
        return Check("C++ compiler", "bad", str(error).splitlines()[0], remedy)
    if shutil.which(path) is None:
        return Check("C++ compiler", "bad", f"{path} is not there", remedy)
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    return Check("C++ compiler", "ok", version[0] if version else path)


def headers() -> Check:
    path = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    if not path.exists():
        return Check("Python.h", "bad", f"not in {path.parent}", "apt-get install python3-dev (or the like)")
    return Check("Python.h", "ok", str(path))


def cpu_kernels() -> Check:
    """Build or load them, and let them round a tensor."""
    from fp8_compile.kernels.cpu.library import library
    from fp8_compile.kernels.cpu.quantize import cast_op, scales_op
    from fp8_compile.kernels.formats import E4M3
    from fp8_compile.kernels.quantize import WHOLE, quantize

    if (loaded := library()) is None:
        remedy = "see the line on the C++ compiler; until then plain PyTorch does their work, slowly"
        return Check("CPU kernels", "bad", "not built", remedy)
    x, block = torch.linspace(-3.0, 5.0, 1024).view(32, 32), [WHOLE, WHOLE]
    quant_scale, _ = scales_op(x, E4M3.dtype, block)
    ours, reference = cast_op(x, quant_scale, E4M3.dtype, block), quantize(x, E4M3.dtype, (WHOLE, WHOLE))[0]
    different = int((ours.view(torch.uint8) != reference.view(torch.uint8)).sum())
    if different:
        remedy = "please report it with the compiler's version; set CXX to another compiler meanwhile"
        return Check("CPU kernels", "bad", f"{different} of {x.numel()} FP8 values are wrong", remedy)
    which = re.sub(r"_[0-9a-f]{32}$", "", pathlib.Path(loaded._name).stem)  # named after what they are compiled for
    return Check("CPU kernels", "ok", f"{which} built; {x.numel()} values rounded as the reference does")


def cache() -> Check:
    try:
        folder = cache_folder()  # makes it
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check("cache folder", "bad", str(error), "set TORCHINDUCTOR_CACHE_DIR to a folder that can be written")
    return Check("cache folder", "ok", folder)


def gpu() -> Check:
    from fp8_compile.target import Target

    if not torch.cuda.is_available():
        remedy = "the CPU is used; options={'target': 'cuda:90'} still shows a GPU's decisions"
        return Check("GPU", "note", "none", remedy)
    name = torch.cuda.get_device_name(0)
    try:
        target = Target.of_device(torch.device("cuda", 0))
    except ValueError as error:
        return Check("GPU", "bad", f"{name}: {error}", "Ada, Hopper, Blackwell, MI300 and newer multiply FP8")
    return Check("GPU", "ok", f"{name} ({target}): recipes {', '.join(sorted(target.recipes))}")


def whole() -> Check:
    """Compile a small layer, forward and backward, and compare it with the plain one."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 32), torch.randn(16, 64)
    expected = layer(x).detach()
    compiled = torch.compile(layer, backend="fp8")
    result = compiled(x)
    result.sum().backward()
    error = float((result.detach() - expected).norm() / expected.norm())
    if not error < 0.1:
        return Check("a compiled layer", "bad", f"relative error {error:.2%}", "please report it")
    return Check("a compiled layer", "ok", f"trains; relative error of forward {error:.2%}, as FP8 has")
