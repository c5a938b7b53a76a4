"""Train a byte language model in FP8, bf16 and FP32 side by side, with checkpoints, and draw what happened.

    python examples/train_lm.py [--steps 300] [--out train_lm]
    python examples/train_lm.py --resume --steps 400            # goes on where the last run ended

The three runs start from the same weights and see the same batches of the standard library's sources. FP8 and bf16
train a bf16 model with FP32 master weights; FP8 also has a dynamic loss scale and a short warm-up. The folder gets
``checkpoint.pt`` and, with matplotlib, ``curves.png``: losses, scales, and how much was saturated.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fp8_compile
from byte_lm import ByteLM, batches, stdlib_text

BATCH, TIME, LEARNING_RATE = 8, 64, 1e-3
LOOK_EVERY = 10  # steps between two looks at scales and counts
WATCHED = "blocks.0.mlp.gate_proj#0"  # the layer whose scales are drawn


class Run:
    """One model in training. ``parts`` is what a checkpoint holds."""

    def __init__(self, name: str, model: nn.Module, warmup: int) -> None:
        self.name, self.model = name, model if name == "fp32" else model.to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.losses: list[float] = []
        self.seen: list[dict[str, float]] = []  # scales and counts, FP8 only
        self.parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        if name == "fp8":
            options = {"warmup_steps": warmup, "stats": True}
            self.compiled = torch.compile(self.model, backend="fp8", options=options)
            self.parts["training"] = fp8_compile.attach(
                self.compiled, self.optimizer, loss_scale="dynamic", master_weights=True
            )
        else:
            self.compiled = torch.compile(self.model)
            if name == "bf16":
                self.parts["masters"] = fp8_compile.MasterWeights(self.optimizer)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        loss = self.compiled(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if self.name == "fp8" and len(self.losses) % LOOK_EVERY == 0:
            self.look()

    def look(self) -> None:
        """Note scales, the share of elements saturated or flushed to zero since the last look, and the loss scale."""
        state, training = fp8_compile.scaling_state(self.model), self.parts["training"]
        rows = state.stats()
        elements = max(1, sum(row.elements for row in rows))
        scales = {row.slot.rpartition(".")[2]: row.scale for row in rows if row.slot.startswith(WATCHED)}
        self.seen.append(
            {
                "step": len(self.losses),
                "saturated": sum(row.overflow for row in rows) / elements,
                "flushed": sum(row.underflow for row in rows) / elements,
                "skipped steps": training.skipped_steps,
                "loss scale": training.loss_scale,
                **{f"{role} scale": scale for role, scale in scales.items()},
            }
        )
        state.reset_stats()

    def state_dict(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return {"losses": self.losses, "seen": self.seen, **states}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses, self.seen = state["losses"], state["seen"]
        for name, part in self.parts.items():  # the model, the optimizer, then what stands between them
            part.load_state_dict(state[name])


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    model = ByteLM(layers=2, d=128, heads=4, hidden=384, context=TIME)
    runs = [Run(name, copy.deepcopy(model), options.warmup) for name in ("fp32", "bf16", "fp8")]
    generator = torch.Generator().manual_seed(0)
    checkpoint = options.out / "checkpoint.pt"
    if options.resume:
        load(checkpoint, runs, generator)
    train(runs, generator, options, checkpoint)
    print_summary(runs)
    try:
        plot(runs, options.out / "curves.png")
        print(f"\ncurves: {options.out / 'curves.png'}")
    except ImportError:
        print("\nno curves.png: matplotlib is not installed (pip install 'fp8_compile[examples]')")


def train(runs: list[Run], generator: torch.Generator, options: argparse.Namespace, checkpoint: Path) -> None:
    done = len(runs[0].losses)
    source = batches(stdlib_text(), batch=BATCH, time=TIME, generator=generator)
    with tqdm(total=options.steps, initial=done, desc="compiling", unit="step") as progress:
        for step in range(done + 1, options.steps + 1):
            tokens, targets = next(source)
            for run in runs:
                run.step(tokens, targets)
            progress.set_description("training")
            progress.set_postfix({run.name: f"{run.losses[-1]:.3f}" for run in runs}, refresh=False)
            progress.update()
            if step % options.save_every == 0 or step == options.steps:
                save(checkpoint, runs, generator)


def save(path: Path, runs: list[Run], generator: torch.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".tmp")  # an interrupted save must not destroy the last checkpoint
    torch.save({"data": generator.get_state(), **{run.name: run.state_dict() for run in runs}}, partial)
    partial.replace(path)


def load(path: Path, runs: list[Run], generator: torch.Generator) -> None:
    state = torch.load(path, weights_only=True)
    generator.set_state(state["data"])
    for run in runs:
        run.load_state_dict(state[run.name])
    print(f"resumed from {path} at step {len(runs[0].losses)}")


def print_summary(runs: list[Run]) -> None:
    """Print the losses at the end, and what FP8 needed for them."""
    window = min(20, len(runs[0].losses))
    full = statistics.mean(runs[0].losses[-window:])
    print(f"\nmean loss of the last {window} steps, nats per byte, and its ratio to FP32's")
    for run in runs:
        mean = statistics.mean(run.losses[-window:])
        print(f"{run.name:>6}  {mean:.4f}  {mean / full:.4f}x")
    training = runs[-1].parts["training"]
    print(
        f"\nFP8: {training.steps} steps, {training.skipped_steps} skipped, loss scale {training.loss_scale:g}, "
        f"master weights {training.master_weights.memory_bytes() / 2**20:.1f} MiB"
    )


def plot(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, scales, counts) = pyplot.subplots(3, 1, figsize=(8, 10), sharex=True, height_ratios=(2, 1, 1))
    for run in runs:
        losses.plot(range(1, len(run.losses) + 1), run.losses, label=run.name, linewidth=1)
    losses.set_ylabel("loss, nats per byte")
    losses.legend()
    seen = runs[-1].seen
    steps = [row["step"] for row in seen]
    for name in sorted({name for row in seen for name in row if name.endswith("scale")}):
        scales.semilogy(steps, [row.get(name, float("nan")) for row in seen], label=name, linewidth=1)
    scales.set_ylabel(f"scales of\n{WATCHED.partition('#')[0]}")
    scales.legend(fontsize="small")
    for name in ("saturated", "flushed"):
        counts.plot(steps, [100 * row[name] for row in seen], label=f"{name}, % of elements", linewidth=1)
    counts.plot(steps, [row["skipped steps"] for row in seen], label="skipped steps", linewidth=1, linestyle="--")
    counts.set_ylabel("overflow and underflow")
    counts.set_xlabel("step")
    counts.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps in all (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, help="of them in high precision (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=100, help="steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("train_lm"), help="folder (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    options = parser.parse_args()
    if min(options.steps, options.save_every) < 1 or options.warmup < 0:
        parser.error("--steps and --save-every must be at least 1, --warmup at least 0")
    if options.resume and not (options.out / "checkpoint.pt").exists():
        parser.error(f"there is no checkpoint in {options.out} to resume from")
    return options


if __name__ == "__main__":
    main()
