"""Convergence of low-precision training on real text: the final loss of each recipe over that of FP32.

    python benchmarks/convergence.py [--steps 500 --seeds 0 1 2 --layers 8 --recipes fp32 mxfp8 nvfp4 nvfp4+late]
    python benchmarks/convergence.py --results losses.jsonl --seeds 0 --recipes mxfp8      one piece at a time

A byte language model learns the sources of the standard library. All runs of a seed begin with the same weights and see
the same batches. The number is the mean loss of the last 50 steps over that of FP32, for each seed. ``held out``: the
same ratio on text that no run has seen, where the weights that a run ends with are multiplied in FP32.

``fp32``: FP32 again, with weights that differ by a millionth at the beginning. Training is chaotic, and what this row
shows is the noise of the comparison. To keep it small, activations keep their size from block to block at the
beginning, a step has 2048 tokens, gradients are clipped, and the learning rate rises for a tenth of the steps and falls
to 0 in the second half. ``+late``: the forward gemms of the last fifth of the steps are in high precision
(``fp8_compile.set_precision``). ``mxfp8+formula``, ``nvfp4+formula``: the recipe in plain PyTorch, an autograd function
and no compiler; what it costs there is what the format costs. Any other word after a ``+`` is an option of the backend,
True or as it says: ``nvfp4+four_over_six+late``, ``nvfp4+global_scale=exact``.

Blocks are compiled one by one, which is what makes many runs affordable. ``--results``: losses are appended to that
file, and runs that it has are not run again; FP32 is run once for each seed.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
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

BATCH, TIME, LAST = 32, 64, 50
HELD_OUT = 20  # a part of the text
REFERENCE = "reference"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--recipes", nargs="+", default=["fp32", "mxfp8", "nvfp4", "nvfp4+late"])
    parser.add_argument("--rate", type=float, default=1e-3, help="the largest learning rate")
    parser.add_argument("--results", type=pathlib.Path, help="a file of losses")
    arguments = parser.parse_args()
    text = stdlib_text()
    text, held_out = text[: -len(text) // HELD_OUT], text[-len(text) // HELD_OUT :]
    unseen = next(batches(held_out, batch=512, time=TIME, generator=torch.Generator().manual_seed(0)))
    size = f"{arguments.layers} layers, d={arguments.width}, {arguments.steps} steps of {BATCH * TIME} tokens"
    print(f"byte LM, {size}; loss over FP32 in the last {LAST}, and held out", flush=True)
    known = _read(arguments.results)
    for seed in arguments.seeds:
        model = make_model(seed, arguments.layers, arguments.width)
        source = batches(text, batch=BATCH, time=TIME, generator=torch.Generator().manual_seed(seed))
        data = list(itertools.islice(source, arguments.steps))
        for recipe in (REFERENCE, *arguments.recipes):
            key = (arguments.steps, arguments.layers, arguments.width, arguments.rate, seed, recipe)
            if key not in known:
                known[key] = train(copy.deepcopy(model), data, unseen, recipe, arguments.rate)
                if arguments.results:
                    with arguments.results.open("a", encoding="ascii") as file:
                        file.write(json.dumps([*key, *known[key]]) + "\n")
            if recipe == REFERENCE:
                whole = known[key]
                continue
            over, over_held_out = (100 * (loss / of - 1) for loss, of in zip(known[key], whole))
            losses = f"{known[key][0]:.4f}  fp32 {whole[0]:.4f}  {over:+.2f} %"
            print(f"seed {seed}  {recipe:10} {losses}  held out {over_held_out:+.2f} %", flush=True)


def _read(path: pathlib.Path | None) -> dict[tuple[Any, ...], tuple[float, float]]:
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {tuple(key): (loss, held_out) for *key, loss, held_out in map(json.loads, lines)}


def make_model(seed: int, layers: int, width: int = 64) -> ByteLM:
    """Weights that keep the size of activations: then two runs do not drift apart for the least difference."""
    torch.manual_seed(seed)
    model = ByteLM(layers=layers, d=width, heads=width // 32, hidden=3 * width, context=TIME)
    for name, parameter in model.named_parameters():
        if name.startswith("blocks") and parameter.ndim == 2:
            to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(parameter, std=(parameter.shape[1] * (2 * layers if to_residual else 1)) ** -0.5)
    torch.nn.init.normal_(model.embedding.weight)
    torch.nn.init.normal_(model.position.weight, std=0.3)
    return model


def train(
    model: Any, data: list[tuple[Tensor, Tensor]], unseen: tuple[Tensor, Tensor], recipe: str, rate: float
) -> tuple[float, float]:
    """The mean loss of the last steps, and that of unseen text with the final weights."""
    torch._dynamo.reset()
    torch.manual_seed(0)  # of stochastic rounding
    plain = copy.deepcopy(model)
    name, *suffixes = recipe.split("+")
    if name == "fp32":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))
    by_formula = "formula" in suffixes
    if by_formula:
        use_formula(model, FORMULAS[name])
    in_fp32 = by_formula or name in (REFERENCE, "fp32")
    pairs = (suffix.partition("=") for suffix in suffixes if suffix != "late")
    ours: dict[str, Any] = {"recipe": name, **{option: value or True for option, _, value in pairs}}
    options: dict[str, Any] = {} if in_fp32 else {"backend": "fp8", "options": ours}
    for block in () if by_formula else model.blocks:
        block.compile(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step / len(data)))
    losses = []
    for step, (tokens, targets) in enumerate(data):
        if "late" in suffixes and step == len(data) * 4 // 5:
            fp8_compile.set_precision(model, output="high")
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        return statistics.mean(losses[-LAST:]), plain(*unseen).item()


class FormulaLinear(torch.autograd.Function):
    """``x @ w^T`` and its gradients, each operand rounded along the contraction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rounding: type[Rounding]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rounding = rounding
        return rounding.rows(x) @ rounding.weight(w).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (x, w), (grad,), rounding = ctx.saved_tensors, grads, ctx.rounding
        dx = rounding.gradient(grad) @ rounding.weight(w)
        dw = rounding.gradient(rounding.turned(grad.t())) @ rounding.rows(rounding.turned(x.t())).t()
        return dx, dw, None


class Rounding:
    """To MXFP8, by the formulas of ``kernels/mxfp8.py``."""

    kept = 0  # of the last blocks, in FP32

    @staticmethod
    def rows(x: Tensor) -> Tensor:
        return dequantize_mx(*quantize_mx(x, (1, 32)), (1, 32))

    gradient = rows

    @staticmethod
    def weight(w: Tensor) -> Tensor:
        return dequantize_mx(*quantize_mx(w, (32, 32)), (32, 32))

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        """Before the product over tokens."""
        return x


class NVFP4Rounding(Rounding):
    """To NVFP4, by what NVIDIA writes about its recipe and by none of our code."""

    kept = 1
    hadamard = functools.reduce(torch.kron, [torch.tensor([[1.0, 1.0], [1.0, -1.0]])] * 4) / 4
    signs = 1.0 - 2.0 * torch.randint(0, 2, (16, 1), generator=torch.Generator().manual_seed(0))

    @classmethod
    def rows(cls, x: Tensor) -> Tensor:
        return _nvfp4(x, 1, at_random=False)

    @classmethod
    def gradient(cls, x: Tensor) -> Tensor:
        return _nvfp4(x, 1, at_random=True)

    @classmethod
    def weight(cls, w: Tensor) -> Tensor:
        return _nvfp4(w, 16, at_random=False)

    @classmethod
    def turned(cls, x: Tensor) -> Tensor:
        return (x.unflatten(-1, (-1, 16)) @ (cls.signs * cls.hadamard)).flatten(-2)


def _nvfp4(x: Tensor, height: int, *, at_random: bool) -> Tensor:
    """x with one E4M3 scale for each ``height`` by 16 values, and one FP32 scale for all."""
    blocks = x.unflatten(-1, (-1, 16)).unflatten(0, (-1, height))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    whole = amax.amax() / (6 * 448)
    scale = (amax / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    values = (blocks / scale).nan_to_num(0.0).clamp(-6, 6)
    step = torch.where(values.abs() < 2, 0.5, torch.where(values.abs() < 4, 1.0, 2.0))
    codes = torch.floor(values / step + torch.rand_like(values)) if at_random else torch.round(values / step)
    return (codes * step * scale).flatten(-2).flatten(0, 1)


FORMULAS = {"mxfp8": Rounding, "nvfp4": NVFP4Rounding}


def use_formula(model: Any, rounding: type[Rounding]) -> None:
    def by_formula(layer: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (x,) = inputs
        return FormulaLinear.apply(x.flatten(0, -2), layer.weight, rounding).view_as(output)

    for block in model.blocks[: len(model.blocks) - rounding.kept]:
        for layer in block.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(by_formula)


def learning_rate(done: float) -> float:
    """Over the largest one, for a part of the steps between 0 and 1."""
    return min(1.0, 10 * done + 0.02, 2 * (1 - done))


if __name__ == "__main__":
    main()
