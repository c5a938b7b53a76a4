"""What a warm-up costs: the first step, a step in high precision, the step in which FP8 begins, and a step after it.

    python benchmarks/warm_up.py [--layers 2] [--d 256] [--steps 5]

The same byte language model twice, with ``warmup_steps`` and without. Caches are off, so both compile.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from byte_lm import ByteLM, batches, stdlib_text  # noqa: E402

TIME = 64


def seconds(warmup_steps: int, steps: int, layers: int, d: int) -> list[float]:
    """How long each step of a training run took."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ByteLM(layers=layers, d=d, heads=4, context=TIME)
    options = {"warmup_steps": warmup_steps, "inductor": {"force_disable_caches": True}}
    compiled = torch.compile(model, backend="fp8", options=options)
    optimizer = torch.optim.AdamW(model.parameters())
    source = batches(stdlib_text(), batch=8, time=TIME, generator=torch.Generator().manual_seed(0))
    taken = []
    for tokens, targets in itertools.islice(source, steps):
        start = time.perf_counter()
        compiled(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--d", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5, help="of the warm-up (default: %(default)s)")
    options = parser.parse_args()
    seconds(0, 1, 1, 64)  # the first compilation of a process loads much that stays loaded
    print(f"{'warmup_steps':>12}{'first step':>13}{'warm-up step':>14}{'first in FP8':>14}{'FP8 step':>11}")
    for warmup_steps in (0, options.steps):
        taken = seconds(warmup_steps, warmup_steps + 8, options.layers, options.d)
        first, rest = taken[0], taken[1:]
        warm, begin, after = rest[: warmup_steps - 1] if warmup_steps else [], taken[warmup_steps], taken[-6:]
        cells = [f"{1000 * statistics.median(warm):.0f} ms", f"{1000 * begin:.0f} ms"] if warm else ["-", "-"]
        last = f"{1000 * statistics.median(after):.0f} ms"
        print(f"{warmup_steps:>12}{first:>11.1f} s{cells[0]:>14}{cells[1]:>14}{last:>11}")


if __name__ == "__main__":
    main()
