"""MXFP8 and NVFP4 of training on the CPU against FP8: gemms against ``scaled_mm``, quantizes against delayed ones.

    python benchmarks/block_formats_cpu.py [--shapes 2048x1024x1024 ...] [--rounds 15] [--threads 1] [--json]

All take turns, so that a noisy neighbour slows them alike; ratios are of the best times, lower is faster. One thread is
timed by the CPU's time, more by the clock. Gemms have the layouts of the three gemms of a layer; a matrix to quantize
is M x K. NVFP4 quantizes are for the five operands of the recipe: inputs, weights, gradients at random, and gradients
and inputs transposed and rotated.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any, Callable

import torch

import fp8_compile  # noqa: F401  caps oneDNN where its AMX path crashes
from fp8_compile.kernels import mxfp8, nvfp4_training
from fp8_compile.kernels.cpu.library import working_isa
from fp8_compile.kernels.cpu.quantize import quantize_delayed_op
from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op
from fp8_compile.kernels.quantize import quantize_op

SHAPES = ("2048x1024x1024", "1024x512x512", "4096x2048x2048")
E4M3 = torch.float8_e4m3fn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="M x N x K")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    tables: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        m, n, k = map(int, shape.split("x"))
        tables.append({"shape": shape, "gemms": best_of(gemms(m, n, k), arguments.rounds)})
        for dtype in (torch.float32, torch.bfloat16):
            name = f"quantizes of {str(dtype).removeprefix('torch.')}"
            tables[-1][name] = best_of(quantizes(torch.randn(m, k, dtype=dtype)), arguments.rounds)
    isa = working_isa()
    assert isa is not None, "there is no compiler"
    if arguments.json:
        print(json.dumps({"isa": isa.name, "threads": torch.get_num_threads(), "tables": tables}, indent=2))
        return
    print(f"{isa.name}, {torch.get_num_threads()} threads; ms, and the ratio to the first of each table")
    for table in tables:
        for title, times in table.items():
            if title == "shape":
                continue
            print(f"\n{table['shape']}: {title}")
            first = next(iter(times.values()))
            for name, ms in times.items():
                print(f"  {name:<44}{ms:9.3f} {ms / first:6.2f}x")


def gemms(m: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
    x, w, one = torch.randn(m, k), torch.randn(n, k), torch.ones(1, 1)
    fp8_x, fp8_w = x.to(E4M3), w.to(E4M3)
    found: dict[str, Callable[[], Any]] = {
        "scaled_mm": lambda: scaled_mm_op(fp8_x, fp8_w.t(), one, one, None, torch.float32),
        "scaled_mm, both transposed": lambda: scaled_mm_op(transposed_x.t(), fp8_w_rows, one, one, None, torch.float32),
    }
    transposed_x, fp8_w_rows = fp8_x.t().contiguous(), fp8_w.t().contiguous()
    qx, sx = mxfp8.quantize_mx_op(x, (1, 32))
    for title, block in (("1x32", (1, 32)), ("32x32", (32, 32))):
        qw, sw = mxfp8.quantize_mx_op(w, block)
        found[f"mx_mm, weight {title}"] = lambda qw=qw, sw=sw: mxfp8.mx_mm_op(
            qx, qw.t(), sx, sw.t(), None, torch.float32
        )
    columns, column_scales = mxfp8.quantize_mx_op(x.t().contiguous(), (32, 1))  # [K, M]: along K, down the columns
    others, other_scales = mxfp8.quantize_mx_op(w.t().contiguous(), (32, 1))
    found["mx_mm, both transposed"] = lambda: mxfp8.mx_mm_op(
        columns.t(), others, column_scales.t(), other_scales, None, torch.float32
    )
    enc = torch.full((1, 1), 500.0)
    left = nvfp4_training.quantize_nvfp4_op(x, enc, (1, 16), False, False, None, 0, False)
    for block in ((1, 16), (16, 16)):
        right = nvfp4_training.quantize_nvfp4_op(w, enc, block, False, False, None, 0, False)
        found[f"nvfp4_train_mm, right {block[0]}x16"] = lambda right=right: nvfp4_training.nvfp4_train_mm_op(
            left[0], right[0], left[1], right[1], one, one, None, torch.float32
        )
    return found


def quantizes(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    scale, enc, seed = torch.full((1, 1), 90.0), torch.full((1, 1), 500.0), torch.tensor([7])
    found: dict[str, Callable[[], Any]] = {
        "quantize_delayed": lambda: quantize_delayed_op(x, scale, E4M3, True),
        "quantize, by rows": lambda: quantize_op(x, E4M3, (1, -1)),
    }
    for block in mxfp8.BLOCKS:
        found[f"quantize_mx {block[0]}x{block[1]}"] = lambda block=block: mxfp8.quantize_mx_op(x, block)
    for title, block, across, rotated, at_random, both in (
        ("1x16", (1, 16), False, False, False, False),
        ("1x16, four over six", (1, 16), False, False, False, True),
        ("16x16", (16, 16), False, False, False, False),
        ("16x16, transposed", (16, 16), True, False, False, False),
        ("1x16, at random", (1, 16), False, False, True, False),
        ("1x16, transposed, rotated", (1, 16), True, True, False, False),
        ("1x16, transposed, rotated, at random", (1, 16), True, True, True, False),
    ):
        arguments = (x, enc, block, across, rotated, seed if at_random else None, 1, both)
        found[f"quantize_nvfp4 {title}"] = lambda arguments=arguments: nvfp4_training.quantize_nvfp4_op(*arguments)
    return found


def best_of(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The best time of each in milliseconds."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            start = clock()
            run()
            best[name] = min(best[name], 1e3 * (clock() - start))
    return best


if __name__ == "__main__":
    main()
