"""Gradients of low-precision training along a run, against FP32's and those of the formulas, on the same weights.

    python benchmarks/gradient_errors.py [--recipes mxfp8 nvfp4] [--steps 200 --every 10]

Two runs of training drift apart for the least difference, so that a loss at the end says little about a recipe. Here
chaos is taken out: a run in low precision goes its way (the model, data and learning rate of ``convergence.py``), and
every few steps a model in FP32, and one that multiplies by the recipe's formulas in plain PyTorch
(``convergence.py``), are given its weights and the same batch. Of the gradient g of each matrix in the blocks it
prints, against FP32's g32:

    along            <g, g32> / <g32, g32> - 1    how much longer it is: a bias, where the mean over steps is not 0
    error            |g - g32| / |g32|
    formula's error  the same of the formula's
    to formula       |g - formula's| / |g32|      of ``mxfp8``: ``nvfp4`` rounds at random

The last is what sums in another order make of it, and roundings that fall to the other side for them. A defect of the
compiled step, such as weights that are stale by a step, would stand out there; in an error above the formula's, too.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from typing import Any, Sequence

import torch
from convergence import BATCH, FORMULAS, TIME, batches, learning_rate, make_model, stdlib_text, use_formula
from torch import Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", nargs="+", default=["mxfp8", "nvfp4"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    arguments = parser.parse_args()
    source = batches(stdlib_text(), batch=BATCH, time=TIME, generator=torch.Generator().manual_seed(0))
    data = list(itertools.islice(source, arguments.steps))
    print("mean over the layers of a step; at the end mean over steps, and its standard error")
    for recipe in arguments.recipes:
        follow(recipe, data, arguments.every, arguments.layers, arguments.rate)


def follow(recipe: str, data: list[tuple[Tensor, Tensor]], every: int, layers: int, rate: float) -> None:
    torch._dynamo.reset()
    model: Any = make_model(0, layers)
    plain, formula = copy.deepcopy(model), copy.deepcopy(model)
    use_formula(formula, FORMULAS[recipe])
    for block in model.blocks:
        block.compile(backend="fp8", options={"recipe": recipe})
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step / len(data)))
    found: list[tuple[float, ...]] = []
    for step, batch in enumerate(data):
        loss, gradients = gradients_of(model, batch)
        if step % every == 0:
            for other in (plain, formula):
                other.load_state_dict(model.state_dict())
            loss32, gradients32 = gradients_of(plain, batch)
            loss_formula, gradients_formula = gradients_of(formula, batch)
            parts = [compared(*one) for one in zip(gradients, gradients32, gradients_formula, strict=True)]
            found.append(tuple(map(statistics.mean, zip(*parts))))
            losses = f"loss {loss:.5f}, fp32 {loss32:.5f}, formula {loss_formula:.5f}"
            print(f"{recipe} step {step:4}  {losses}  {_in_words(found[-1], recipe)}", flush=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    each = list(zip(*found))
    print(f"{recipe} mean       {_in_words([statistics.mean(one) for one in each], recipe)}")
    print(f"{recipe} error of it  {_in_words([statistics.stdev(one) / len(one) ** 0.5 for one in each], recipe)}")


def gradients_of(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[float, list[Tensor]]:
    """The loss and the gradients of the matrices in blocks; those of all parameters stay where they are."""
    model.zero_grad()
    loss = model(*batch)
    loss.backward()
    return loss.item(), [one.grad.double() for one in model.blocks.parameters() if one.ndim == 2]


def compared(gradient: Tensor, exact: Tensor, formula: Tensor) -> tuple[float, ...]:
    """along, error, formula's error, to formula."""
    along = ((gradient * exact).sum() / exact.square().sum() - 1).item()
    pairs = (gradient, exact), (formula, exact), (gradient, formula)
    return along, *(((one - other).norm() / exact.norm()).item() for one, other in pairs)


def _in_words(numbers: Sequence[float], recipe: str) -> str:
    along, error, of_formula, to_formula = (f"{100 * one:+.3f} %" for one in numbers)
    words = f"along {along}, error {error}, formula's error {of_formula}"
    return words + (f", to formula {to_formula}" if recipe == "mxfp8" else "")


if __name__ == "__main__":
    main()
