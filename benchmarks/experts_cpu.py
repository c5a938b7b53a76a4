"""A training step of a mixture of experts on the CPU: FP8 against Inductor's FP32 and bf16, in one run.

    python benchmarks/experts_cpu.py [--experts 8 --width 512 --hidden 1024 --tokens 1024 --rounds 15 --json]

Hugging Face's Mixtral block, router and experts, with its experts in groups (`grouped_mm`): two of them a token. Steps
of all variants take turns, as in `train_cpu.py`; ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
from typing import Callable

import torch
from torch import nn
from train_cpu import Variant
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock


class Mixture(nn.Module):
    """One block, and a loss that reaches all of it."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.block = MixtralSparseMoeBlock(config)
        for parameter in self.block.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        y = self.block(x.to(self.block.experts.down_proj.dtype))
        return (y.float() - target).square().mean()


def make_variants(make_model: Callable[[], nn.Module], batch: tuple[torch.Tensor, ...]) -> list[Variant]:
    experts_excluded = {"exclude": ("*.experts",)}
    return [
        Variant("inductor fp32", make_model(), batch),
        Variant("inductor bf16", make_model().bfloat16(), batch),
        Variant("fp8 delayed, bf16 model", make_model().bfloat16(), batch, backend="fp8"),
        Variant("fp8 delayed", make_model(), batch, backend="fp8"),
        Variant("fp8 delayed, experts excluded", make_model(), batch, backend="fp8", options=experts_excluded),
        Variant("fp8 rowwise", make_model(), batch, backend="fp8", options={"recipe": "rowwise"}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 8), ("width", 512), ("hidden", 1024), ("tokens", 1024), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    config = MixtralConfig(
        hidden_size=arguments.width, intermediate_size=arguments.hidden, num_local_experts=arguments.experts
    )
    config._experts_implementation = "grouped_mm"

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return Mixture(config)

    generator = torch.Generator().manual_seed(0)
    batch = tuple(torch.randn(1, arguments.tokens, arguments.width, generator=generator) for _ in range(2))
    torch.compile(nn.Linear(8, 8))(torch.randn(4, 8)).sum().backward()
    variants = make_variants(make_model, batch)
    for _ in range(arguments.rounds):
        for variant in variants:
            variant.timed_step()
    base = variants[0]
    rows = [
        {
            "variant": variant.name,
            "step_ms": round(variant.milliseconds, 1),
            "step_ratio": round(variant.milliseconds / base.milliseconds, 3),
            "compile_ratio": round(variant.compile_seconds / base.compile_seconds, 2),
            "loss": round(variant.loss, 4),
            **{name: round(number, 1) for name, number in variant.profile().items()},
        }
        for variant in variants
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    size = f"{arguments.experts} experts {arguments.width}x{arguments.hidden}, 2 a token, {arguments.tokens} tokens"
    print(f"Mixtral block, {size}, {torch.get_num_threads()} threads")
    print(
        f"{'variant':30} {'step ms':>8} {'ratio':>6} {'compile':>8} {'loss':>8}"
        f" {'gemm ms':>8} {'quantize':>8} {'rest':>7} {'peak MB':>8}"
    )
    for row in rows:
        print(
            "{variant:30} {step_ms:8.1f} {step_ratio:6.2f} {compile_ratio:8.2f} {loss:8.4f}"
            " {gemm:8.1f} {quantize:8.1f} {rest:7.1f} {peak_mb:8.1f}".format(**row)
        )


if __name__ == "__main__":
    main()
