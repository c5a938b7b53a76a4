"""Convergence of low-precision training on real text: the final loss of each recipe over that of FP32.

    python benchmarks/convergence.py [--steps 500 --seeds 0 1 2 --layers 8 --recipes mxfp8 nvfp4 nvfp4+late]

A byte language model learns the sources of the standard library. All runs of a seed begin with the same weights and see
the same batches. The learning rate rises for a tenth of the steps and falls to 0 in the last fifth. The number is the
mean loss of the last 50 steps over that of FP32, for each seed. ``+late``: the forward gemms of the last fifth of the
steps are in high precision (``fp8_compile.set_precision``). ``fp32``: FP32 again, with weights that differ by a
millionth at the beginning: what it shows is the noise of the comparison. ``formula``: MXFP8 in plain PyTorch, by the
formulas of ``kernels/mxfp8.py`` in an autograd function, uncompiled: what ``mxfp8`` has to equal on the same weights.
Blocks are compiled one by one, which is what makes many runs affordable.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import pathlib
import statistics
import sys
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
import fp8_compile  # noqa: E402
from byte_lm import ByteLM, batches, stdlib_text  # noqa: E402
from fp8_compile.kernels.mxfp8 import dequantize_mx, quantize_mx  # noqa: E402

BATCH, TIME, LAST = 8, 64, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--recipes", nargs="+", default=["fp32", "mxfp8", "nvfp4", "nvfp4+late"])
    arguments = parser.parse_args()
    text = stdlib_text()
    print(f"byte LM, {arguments.layers} layers, {arguments.steps} steps; loss over FP32 in the last {LAST}", flush=True)
    for seed in arguments.seeds:
        torch.manual_seed(seed)
        model = ByteLM(layers=arguments.layers, d=128, heads=4, hidden=384, context=TIME)
        source = batches(text, batch=BATCH, time=TIME, generator=torch.Generator().manual_seed(seed))
        data = list(itertools.islice(source, arguments.steps))
        whole = train(copy.deepcopy(model), data, None)
        for recipe in arguments.recipes:
            loss = train(copy.deepcopy(model), data, recipe)
            over = 100 * (loss / whole - 1)
            print(f"seed {seed}  {recipe:10} {loss:.4f}  fp32 {whole:.4f}  {over:+.2f} %", flush=True)


def train(model: Any, data: list[tuple[Tensor, Tensor]], recipe: str | None) -> float:
    """The mean loss of the last steps; no recipe: Inductor's FP32."""
    torch._dynamo.reset()
    torch.manual_seed(0)  # of stochastic rounding
    name, _, late = (recipe or "").partition("+")
    if name == "fp32":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))
        recipe = None
    if name == "formula":
        recipe = None
        _use_formula(model)
    options: dict[str, Any] = {"backend": "fp8", "options": {"recipe": name}} if recipe else {}
    for block in model.blocks if name != "formula" else ():
        block.compile(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step / len(data)))
    losses = []
    for step, (tokens, targets) in enumerate(data):
        if late and step == len(data) * 4 // 5:
            fp8_compile.set_precision(model, output="high")
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return statistics.mean(losses[-LAST:])


class MXFP8Linear(torch.autograd.Function):
    """``x @ w^T`` and its gradients, each operand rounded to MXFP8 along the contraction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _rounded(x, (1, 32)) @ _rounded(w, (32, 32)).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (x, w), (grad,) = ctx.saved_tensors, grads
        return (
            _rounded(grad, (1, 32)) @ _rounded(w, (32, 32)),
            _rounded(grad, (32, 1)).t() @ _rounded(x, (32, 1)),
        )


def _rounded(x: Tensor, block: tuple[int, int]) -> Tensor:
    return dequantize_mx(*quantize_mx(x, block), block)


def _use_formula(model: Any) -> None:
    def by_formula(layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (x,) = inputs
        return MXFP8Linear.apply(x.flatten(0, -2), layer.weight).view_as(output)

    for layer in model.blocks.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(by_formula)


def learning_rate(done: float) -> float:
    """Over the largest one, for a part of the steps between 0 and 1."""
    return min(1.0, 10 * done + 0.02, 5 * (1 - done))


if __name__ == "__main__":
    main()
