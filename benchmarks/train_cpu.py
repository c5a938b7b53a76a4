"""A training step on the CPU: FP8 against Inductor's FP32 and bf16 and torchao's emulated FP8, in one run.

    python benchmarks/train_cpu.py [--layers 4 --width 512 --tokens 1024 --rounds 15 --json]
    python benchmarks/train_cpu.py --layers 2 --width 1024 --hidden 2816

How that is measured: `step_variants.py`.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Callable

import torch
from torch import nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from step_variants import Variant, compare, pay_for_what_is_shared  # noqa: E402

from byte_lm import ByteLM  # noqa: E402

SEQUENCE = 256


def make_variants(
    make_model: Callable[[], nn.Module], batch: tuple[torch.Tensor, ...], recipes: list[str]
) -> list[Variant]:
    variants = [Variant("inductor fp32", make_model(), batch)]
    variants.append(Variant("inductor bf16", make_model().bfloat16(), batch))
    variants.append(Variant("torchao tensorwise, emulated", torchao_emulated(make_model()), batch))
    variants.append(Variant("fp8 delayed, bf16 model", make_model().bfloat16(), batch, backend="fp8"))
    for recipe in recipes:
        options = {"recipe": recipe, "keep_last": 0}  # all multiply the same layers
        variants.append(Variant(f"fp8 {recipe}", make_model(), batch, backend="fp8", options=options))
    return variants


def torchao_emulated(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True)
    return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=None, help="default: 4 x width")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=15)
    recipes = ["delayed", "tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
    parser.add_argument("--recipes", nargs="+", default=recipes)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return ByteLM(arguments.layers, arguments.width, hidden=arguments.hidden, context=SEQUENCE)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (arguments.tokens // SEQUENCE, SEQUENCE + 1), generator=generator)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    pay_for_what_is_shared()
    variants = make_variants(make_model, batch, arguments.recipes)
    size = f"{arguments.layers} layers, d={arguments.width}, {arguments.tokens} tokens"
    compare(variants, arguments.rounds, f"byte LM, {size}", as_json=arguments.json)


if __name__ == "__main__":
    main()
