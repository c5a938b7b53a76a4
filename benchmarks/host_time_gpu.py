"""Host microseconds of what a training step on a GPU calls from Python; no GPU is needed.

    python benchmarks/host_time_gpu.py [--weights 64] [--calls 1000] [--rounds 7] [--json]

    cuBLASLt             one gemm with a residual to add; by C++, and by Python as where there is no compiler
    fp8_compile op       the same as generated code calls it: through torch's dispatcher
    quantize_many        all weights of a model into their FP8 copies
    update_scales        all slots of a table of the scaling state

Libraries are stand-ins that do nothing (``tests/support/cublaslt_stand_in.c``, ``stub_driver.py``), so what is measured
is our own time and, for the last two, Triton's. The figure is the fastest of some rounds: on a machine that is shared
the others measure its neighbours.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import pathlib
import subprocess
import tempfile
import timeit
from typing import Any, Callable
from unittest import mock

import torch
from stub_driver import stub_driver

from fp8_compile.kernels.formats import E4M3
from fp8_compile.kernels.gpu import cublaslt_mm, quantize_many, update_scales
from fp8_compile.kernels.gpu.cublaslt import CublasLt
from fp8_compile.kernels.gpu.cublaslt_compiled import fastest
from fp8_compile.kernels.gpu.cublaslt_op import Library
from fp8_compile.torch_internals.inductor import cpp_compiler

STAND_IN = pathlib.Path(__file__).parents[1] / "tests" / "support" / "cublaslt_stand_in.c"
SIZE = 64  # of every matrix; it makes no difference
SLOTS, LENGTH = 256, 16


def microseconds(call: Callable[[], Any], calls: int, rounds: int) -> float:
    """Of one call, in the fastest of ``rounds``."""
    call()
    return min(timeit.repeat(call, number=calls, repeat=rounds)) / calls * 1e6


@functools.cache
def stand_in() -> ctypes.CDLL:
    """cuBLASLt as far as we call it; its gemms do nothing."""
    with tempfile.TemporaryDirectory() as folder:
        built = pathlib.Path(folder) / "libcublasLt.so"
        command = [cpp_compiler(), "-x", "c", "-O2", "-shared", "-fPIC", "-o", str(built), str(STAND_IN), "-lm"]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(built))
    ctypes.c_int.in_dll(library, "computes").value = 0
    return library


def gemms(calls: int, rounds: int) -> dict[str, float]:
    """By C++, by Python, and through the dispatcher."""
    left, right = (torch.ones(SIZE, SIZE).to(torch.float8_e4m3fn) for _ in range(2))
    added = torch.zeros(SIZE, SIZE, dtype=torch.bfloat16)
    given = cublaslt_mm.Operands(left, right.t(), torch.ones(()), torch.ones(()), added, None, torch.bfloat16)
    y, found = torch.empty_like(added), {}
    ways: dict[str, Callable[[ctypes.CDLL], Library]] = {"C++": fastest, "Python": CublasLt}
    for name, way in ways.items():
        library = way(stand_in())
        found[f"cuBLASLt, {name}"] = microseconds(
            functools.partial(cublaslt_mm.GEMM.by_cublaslt, library, given, y), calls, rounds
        )
        with mock.patch.object(cublaslt_mm.GEMM, "library_of", {None: library}.get):  # by the index of the device
            op = functools.partial(_on_cpu(), *given, out=y)
            found[f"fp8_compile op, {name}"] = microseconds(op, calls, rounds)
    return found


@functools.cache
def _on_cpu() -> Any:
    """The operation, with the implementation for GPUs also for CPU tensors."""
    schema = str(cublaslt_mm.GEMM.out_op._schema).replace("fp8_compile::", "")
    _libraries.append(torch.library.Library("fp8_compile_host_time", "FRAGMENT"))
    _libraries[0].define(schema)
    _libraries[0].impl("cublaslt_mm.out", cublaslt_mm.GEMM.multiply_out, "CPU")
    return torch.ops.fp8_compile_host_time.cublaslt_mm.out


_libraries: list[torch.library.Library] = []


def launches(weights: int, calls: int, rounds: int) -> dict[str, float]:
    """What Triton launches, and how many launches each call is."""
    matrices = []
    for x in torch.zeros(weights, SIZE, SIZE, dtype=torch.bfloat16).unbind():
        q, q_t = (torch.empty(SIZE, SIZE, dtype=E4M3.dtype) for _ in range(2))
        scale, amax = torch.ones(1), torch.full((1,), -1.0)
        matrices.append(quantize_many.Matrix(x, q, q_t, scale, amax, quantize_many.new_fingerprints(x)))
    many = quantize_many.QuantizeMany(matrices)
    counts, room = torch.zeros(10, SLOTS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    state = (torch.zeros(SLOTS, LENGTH), torch.zeros(2, SLOTS), counts, torch.zeros(SLOTS))
    timed: dict[str, Callable[[], Any]] = {
        "quantize_many": many,
        "quantize_many, checking": functools.partial(many, check=True),
        "update_scales": functools.partial(update_scales.update_scales, *state, 448.0, "max", 1, room=room),
    }
    found = {}
    kernels = (quantize_many.quantize_many_kernel, update_scales.update_scales_kernel)
    with stub_driver(*kernels) as launched, mock.patch.object(update_scales, "_prepared", _uncached()):
        for name, call in timed.items():
            launched.clear()
            call()
            found[f"{name}, launches"] = float(len(launched))
            found[name] = microseconds(call, calls, rounds)
    return found


def _uncached() -> Any:
    """Launches that are prepared with the stub must not be found afterwards."""
    return functools.cache(update_scales._prepared.__wrapped__)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=int, default=64, help="of the model, each one matrix")
    parser.add_argument("--calls", type=int, default=1000, help="in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found = gemms(arguments.calls, arguments.rounds)
    found |= launches(arguments.weights, arguments.calls, arguments.rounds)
    print(json.dumps(found, indent=2) if arguments.json else table(found, arguments.weights))


def table(found: dict[str, float], weights: int) -> str:
    """One line per call."""
    lines = [f"{'one call of':<28}{'us':>8}{'launches':>10}"]
    for name, number in found.items():
        if not name.endswith(", launches"):
            count = found.get(f"{name}, launches")
            lines.append(f"{name:<28}{number:>8.1f}{'' if count is None else f'{count:.0f}':>10}")
    lines.append(f"quantize_many: {weights} weights; update_scales: {SLOTS} slots with a history of {LENGTH}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
