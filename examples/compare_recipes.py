"""Train the same byte language model under every recipe and in full precision, and compare the losses.

    python examples/compare_recipes.py [--steps 300] [--png losses.png]

All runs start from the same weights and see the same batches of real text, so that their losses can be compared step
by step. The last table gives each recipe's loss over that of FP32, as a mean over the last ``--window`` steps: a single
step's loss depends on its batch.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import itertools
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from byte_lm import ByteLM, batches, stdlib_text

BATCH, TIME = 8, 64
FULL = "fp32"
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4")


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    model = ByteLM(layers=3, d=128, heads=4, hidden=384, context=TIME)
    source = batches(stdlib_text(), batch=BATCH, time=TIME, generator=torch.Generator().manual_seed(0))
    data = list(itertools.islice(source, options.steps))
    losses = {name: train(name, copy.deepcopy(model), data) for name in (FULL, *options.recipes)}
    print_curves(losses)
    print_ratios(losses, options.window)
    if options.png:
        plot(losses, options.png)
        print(f"\nloss curves: {options.png}")


def train(name: str, model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Train once and return the losses, one per step."""
    torch._dynamo.reset()  # each recipe compiles for itself
    compiled = torch.compile(model) if name == FULL else torch.compile(model, backend="fp8", options={"recipe": name})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens, targets in tqdm(data, desc=name, unit="step"):
        loss = compiled(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def print_curves(losses: dict[str, list[float]]) -> None:
    """Print the losses at a few steps, one column per run."""
    last = len(losses[FULL]) - 1
    print("\nLoss, nats per byte, on the same batches:\n")
    print(f"{'step':>6}" + "".join(f"{name:>12}" for name in losses))
    for step in sorted({round(last * part / 6) for part in range(7)}):
        print(f"{step + 1:>6}" + "".join(f"{curve[step]:>12.4f}" for curve in losses.values()))


def print_ratios(losses: dict[str, list[float]], window: int) -> None:
    """Print how far each recipe is from full precision at the end."""
    steps = min(window, len(losses[FULL]))
    print(f"\nMean loss of the last {steps} steps, its ratio to FP32's, and the largest ratio of a single step:\n")
    full = losses[FULL][-steps:]
    for name, curve in losses.items():
        ratio = statistics.mean(curve[-steps:]) / statistics.mean(full)
        worst = max(a / b for a, b in zip(curve[-steps:], full))
        print(f"{name:>12}  {statistics.mean(curve[-steps:]):.4f}  {ratio:.4f}x  {worst:.4f}x")


def plot(losses: dict[str, list[float]], path: Path) -> None:
    """Draw a PNG with the losses, and below them each recipe's difference from FP32."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1))
    for name, curve in losses.items():
        (line,) = above.plot(curve, label=name, linewidth=1)
        if name != FULL:
            below.plot([a - b for a, b in zip(curve, losses[FULL])], color=line.get_color(), linewidth=1)
    above.set_ylabel("loss, nats per byte")
    above.legend()
    below.set_ylabel("difference from fp32")
    below.set_xlabel("step")
    below.axhline(0, color="black", linewidth=0.5)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--window", type=int, default=20, help="steps of the mean at the end (default: %(default)s)")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, help="default: all")
    parser.add_argument("--png", type=Path, help="write the loss curves there (needs matplotlib)")
    options = parser.parse_args()
    if options.steps < 1 or options.window < 1:
        parser.error("--steps and --window must be at least 1")
    if options.png:  # before hours of training, not after them
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--png needs matplotlib: pip install matplotlib, or leave --png out")
        if not options.png.parent.is_dir():
            parser.error(f"--png {options.png}: there is no folder {options.png.parent}")
    return options


if __name__ == "__main__":
    main()
