"""Train a small language model in FP8 next to the same model in full precision, and see what was rewritten.

    python examples/quickstart.py [--steps 80] [--recipe rowwise] [--dump folder]

The one line that matters is ``torch.compile(model, backend="fp8")``: it needs no import of fp8_compile and changes
neither the model nor its state_dict.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fp8_compile  # for explain and its Config; compiling and training need no import
from byte_lm import ByteLM, batches, stdlib_text

BATCH, TIME = 8, 64
SPARKS = "▁▂▃▄▅▆▇█"


class Run:
    """A model in training: its optimizer, its losses and how long each step took."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        start = time.perf_counter()
        loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)
        return self.losses[-1]


def main() -> None:
    options = parse_arguments()
    recipe = {"recipe": options.recipe} if options.recipe else {}

    torch.manual_seed(0)
    model = ByteLM(layers=4, d=256, heads=4, hidden=512, context=TIME)
    full = Run(torch.compile(copy.deepcopy(model)))
    fp8 = Run(torch.compile(model, backend="fp8", options={"dump": str(options.dump), **recipe}))

    text = stdlib_text()
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size / 1e6:.1f}M parameters, {len(text) / 1e6:.1f} MB of Python source")
    source = batches(text, batch=BATCH, time=TIME, generator=torch.Generator().manual_seed(0))
    with tqdm(total=options.steps, desc="compiling both models", unit="step") as progress:
        for tokens, targets in source:
            losses = {"full": full.step(tokens, targets), "fp8": fp8.step(tokens, targets)}
            progress.set_description("training")
            progress.set_postfix({name: f"{loss:.3f}" for name, loss in losses.items()})
            progress.update()
            if progress.n == options.steps:
                break

    print_curves(full, fp8)
    print("\nWhat became of each matmul (the other blocks are like the first):\n")
    print(shorten(str(fp8_compile.explain(model, args=(tokens, targets), config=fp8_compile.Config(**recipe)))))
    newest = max(options.dump.glob("graph_*"))
    print(f"\nThe graph before and after each pass: {newest.resolve()}, for example")
    for path in sorted(newest.glob("joint*.diff")):
        print(f"  {path.name}")
    print(f"\nAll of it to look at: {newest.resolve() / 'report.html'}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=80, help="training steps (default: %(default)s)")
    parser.add_argument("--recipe", help="how scales are chosen (default: the backend's own)")
    parser.add_argument("--dump", type=Path, default=Path("fp8_dumps"), help="folder for dumps (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    return options


def print_curves(full: Run, fp8: Run) -> None:
    """The two loss curves as a table and as sparklines on one scale."""
    last = len(full.losses) - 1
    print("\nLoss, nats per byte, on the same batches:\n")
    print(f"{'step':>6}{'full precision':>17}{'fp8':>9}{'difference':>13}")
    for step in sorted({round(last * part / 8) for part in range(9)}):
        a, b = full.losses[step], fp8.losses[step]
        print(f"{step + 1:>6}{a:>17.4f}{b:>9.4f}{b - a:>+13.4f}")
    print()
    low, high = min(full.losses + fp8.losses), max(full.losses + fp8.losses)
    for name, run in (("full precision", full), ("fp8", fp8)):
        first, *others = run.seconds
        speed = f"compiled in {first:.0f} s"
        if others:
            speed += f", then {1000 * statistics.median(others):.0f} ms a step"
        print(f"{name:>14}  {sparkline(run.losses, low=low, high=high)}  {speed}")


def sparkline(values: list[float], *, low: float, high: float, width: int = 60) -> str:
    """One character for each of ``width`` stretches of the curve."""
    width = min(width, len(values))
    means = [statistics.mean(values[i * len(values) // width : (i + 1) * len(values) // width]) for i in range(width)]
    return "".join(SPARKS[int((mean - low) / (high - low or 1) * (len(SPARKS) - 1) + 0.5)] for mean in means)


def shorten(table: str) -> str:
    """The table without the rows of all blocks but the first."""
    return "\n".join(
        line for line in table.splitlines() if not line.startswith("blocks.") or line.startswith("blocks.0.")
    )


if __name__ == "__main__":
    main()
