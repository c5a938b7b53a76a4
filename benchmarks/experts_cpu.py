"""A training step of a mixture of experts on the CPU: FP8 against Inductor's FP32 and bf16, in one run.

    python benchmarks/experts_cpu.py [--experts 8 --width 512 --hidden 1024 --tokens 1024 --rounds 15 --json]

Hugging Face's Mixtral block, router and experts, with its experts in groups (`grouped_mm`): two of them a token.
How that is measured: `step_variants.py`.
"""

from __future__ import annotations

import argparse
from typing import Callable

import torch
from step_variants import Variant, compare, pay_for_what_is_shared
from torch import nn
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
    pay_for_what_is_shared()
    size = f"{arguments.experts} experts {arguments.width}x{arguments.hidden}, 2 a token, {arguments.tokens} tokens"
    variants = make_variants(make_model, batch)
    compare(variants, arguments.rounds, f"Mixtral block, {size}", as_json=arguments.json)


if __name__ == "__main__":
    main()
