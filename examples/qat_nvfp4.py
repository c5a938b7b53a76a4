"""Quantization-aware training: how much of what packing to NVFP4 costs comes back, in plain PyTorch, on the CPU.

    python examples/qat_nvfp4.py [--steps 400] [--tune 200]

A byte language model is trained in FP32. Rounded to NVFP4, weights and inputs, it loses quality. Then it is trained on
for some steps with ``recipe="nvfp4", backward="dequantized"``: the forward computes what the packed model will compute,
and the gradients are exact ones of that forward. ``pack(scales="training")`` packs on the very grid of that forward, so
that nothing is lost on the way to serving.

The model that is trained on in FP32 for as many steps is beside it: more steps alone make a better model, too, which
loses something when it is rounded. A model that is hardly trained loses next to nothing.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from typing import Any

import torch
from torch import Tensor, nn

import fp8_compile
from byte_lm import ByteLM, batches, stdlib_text

BATCH, TIME = 16, 64
QAT = {"recipe": "nvfp4", "backward": "dequantized"}


def train(run: Any, model: nn.Module, text: Tensor, steps: int, learning_rate: float, seed: int) -> None:
    """``run`` is the compiled model. The learning rate falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    data = batches(text, batch=BATCH, time=TIME, generator=torch.Generator().manual_seed(seed))
    for tokens, targets in itertools.islice(data, steps):
        run(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """Mean loss on held-out text, nats per byte."""
    data = batches(text, batch=BATCH, time=TIME, generator=torch.Generator().manual_seed(9))
    losses = [float(model(tokens, targets)) for tokens, targets in itertools.islice(data, 40)]
    return sum(losses) / len(losses)


def rounded(model: nn.Module) -> nn.Module:
    """A copy that is packed to nearest, weights and inputs."""
    twin = copy.deepcopy(model)
    fp8_compile.pack(twin, method="rtn", activations="nvfp4", progress=False)
    return twin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="of training in FP32 (default: %(default)s)")
    parser.add_argument("--tune", type=int, default=200, help="of training on (default: %(default)s)")
    options = parser.parse_args()
    text = stdlib_text()
    text, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    torch.manual_seed(0)
    model = ByteLM(layers=3, d=128, heads=4, hidden=384, context=TIME)
    train(torch.compile(model), model, text, options.steps, 2e-3, seed=0)

    longer = copy.deepcopy(model)
    train(torch.compile(longer), longer, text, options.tune, 5e-4, seed=1)

    aware = copy.deepcopy(model)
    run = torch.compile(aware, backend="fp8", options=QAT)
    train(run, aware, text, options.tune, 5e-4, seed=1)
    report = fp8_compile.pack(aware, scales="training", progress=False)
    print(report.summary())

    losses = {
        "FP32": evaluate(model, held_out),
        "FP32, rounded": evaluate(rounded(model), held_out),
        "FP32, trained on": evaluate(longer, held_out),
        "FP32, trained on, rounded": evaluate(rounded(longer), held_out),
        "trained on in NVFP4, packed": evaluate(aware, held_out),
    }
    print("\n| model | loss on held-out text |\n|---|---|")
    for name, loss in losses.items():
        print(f"| {name} | {loss:.4f} |")
    full, opened, on, on_rounded, packed = losses.values()
    gap = opened - full
    print(f"\nof the gap that rounding opened ({gap:.4f}) {(opened - packed) / gap:.0%} recovered")
    gap = on_rounded - on
    print(f"against FP32 that is trained on as long ({gap:.4f}): {(on_rounded - packed) / gap:.0%} recovered")


if __name__ == "__main__":
    main()
