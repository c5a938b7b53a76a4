"""The FP8 gemm on the CPU against torch's FP32 and bf16 matmuls and Inductor's AMX template, in one run.

    python benchmarks/gemm_cpu.py [--shapes 512x2048x2048 ...] [--rounds 9] [--json]
    FP8_COMPILE_CPU_ISA=avx512_bf16 python benchmarks/gemm_cpu.py        without AMX, where there is AMX

All take turns, so that a noisy neighbour slows them alike; ratios are of the best times. FP8 is timed with its packing,
for a weight as it lies ([N, K]), as in forward, and for both operands transposed, as in a weight's gradient. ``upcast``
is what FP8 costs without a kernel: both sides decoded to FP32, and an FP32 matmul. The peak is what the instructions
allow at the clock of a loop timed in this run, which does nothing else; it is an estimate.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Callable

import torch
from torch._inductor import config as inductor_config

import fp8_compile  # noqa: F401  caps oneDNN where its AMX path crashes
from fp8_compile.kernels import scaled_mm as plain
from fp8_compile.kernels.cpu.isa import candidates
from fp8_compile.kernels.cpu.library import load
from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op
from fp8_compile.torch_internals.inductor import cpp_compiler

SHAPES = ("512x2048x2048", "1024x512x1536", "4096x2048x2048", "16x2048x2048", "1x4096x4096", "64x128x128", "8x64x64")
E4M3 = torch.float8_e4m3fn
# Multiplications and additions a core does in a cycle with these instructions, at best.
PER_CYCLE = {"amx": 1024, "avx512_bf16": 64, "avx512": 32, "avx2": 32, "portable": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="M x N x K")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    isa = next(one.name for one in candidates() if load(cpp_compiler(), one).fp8_probe())
    peak = PER_CYCLE.get(isa, 0) * clock() * torch.get_num_threads()
    rows = [measure(*map(int, shape.split("x")), arguments.rounds, peak) for shape in arguments.shapes]
    if arguments.json:
        print(json.dumps({"isa": isa, "threads": torch.get_num_threads(), "rows": rows}, indent=2))
        return
    print(f"{isa}, {torch.get_num_threads()} threads; times in ms, ratios to torch's FP32 matmul (higher is faster)")
    names = ("bf16", "inductor bf16", "upcast", "fp8", "fp8 transposed")
    print(f"{'M x N x K':>16} {'fp32 ms':>9}" + "".join(f"{name:>20}" for name in names) + f"{'of peak':>9}")
    for row in rows:
        cells = "".join(
            f"{row[name]:>12.3f} {row['fp32'] / row[name]:6.2f}x" if name in row else f"{'-':>20}" for name in names
        )
        print(f"{row['shape']:>16} {row['fp32']:9.3f}{cells}{row['of_peak']:9.0%}")


def measure(m: int, n: int, k: int, rounds: int, peak: float) -> dict[str, Any]:
    x, w, one = torch.randn(m, k), torch.randn(n, k), torch.ones(1, 1)
    narrow_x, narrow_w = x.bfloat16(), w.bfloat16()
    q_x, q_w = x.to(E4M3), w.to(E4M3)
    q_x_columns, q_w_rows = x.t().contiguous().to(E4M3).t(), w.t().contiguous().to(E4M3)
    contenders: dict[str, Callable[[], Any]] = {
        "fp32": lambda: x @ w.t(),
        "bf16": lambda: narrow_x @ narrow_w.t(),
        "upcast": lambda: plain.scaled_mm(q_x, q_w.t(), one, one),
        "fp8": lambda: scaled_mm_op(q_x, q_w.t(), one, one, None, torch.float32),
        "fp8 transposed": lambda: scaled_mm_op(q_x_columns, q_w_rows, one, one, None, torch.float32),
    }
    template = inductor_template(narrow_x, narrow_w) if m * n * k >= 2**30 else None
    if template is not None:
        contenders["inductor bf16"] = template
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            run()
            start = time.perf_counter()
            run()
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    flops = 2 * m * n * k
    return {"shape": f"{m}x{n}x{k}", **best, "of_peak": flops / (best["fp8"] * 1e-3) / peak if peak else 0.0}


def inductor_template(x: torch.Tensor, w: torch.Tensor) -> Callable[[], Any]:
    """Inductor's own C++ gemm with a frozen weight: it uses AMX where there is AMX."""
    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.data.copy_(w)
    compiled = torch.compile(layer, mode="max-autotune-no-cudagraphs", fullgraph=True)

    def run() -> Any:
        with torch.no_grad(), inductor_config.patch(freezing=True, max_autotune_gemm_backends="CPP"):
            return compiled(x)

    run()
    return run


def clock() -> float:
    """Cycles a second: a chain of dependent additions does one each cycle."""
    import ctypes
    import pathlib
    import subprocess
    import tempfile

    source = "extern \"C\" void spin(long n) { for (long i = 0; i < n; ++i) asm volatile(\"add $1, %0\" : \"+r\"(i)); }"
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "spin.so")
        command = [cpp_compiler(), "-O2", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
        subprocess.run(command, input=source, text=True, check=True)
        spin = ctypes.CDLL(str(path)).spin
        spin.argtypes = (ctypes.c_long,)
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            spin(200_000_000)  # i grows by 2 a turn, in two dependent additions
            best = min(best, time.perf_counter() - start)
    return 200_000_000 / best


if __name__ == "__main__":
    main()
