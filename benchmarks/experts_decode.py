"""Tokens a second of a mixture of experts of transformers that decodes one sequence: packed weights against bf16.

    python benchmarks/experts_decode.py [--tokens 32] [--rounds 5] [--layers 4] [--experts 32] [--json]

A Qwen3-MoE of width 1024, 8 experts of 768 a token, random weights: the time does not depend on them. The cache of keys
and values has a fixed size, so that one graph serves every position. Contenders take turns, round by round; figures are
medians. Bytes are those of all weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, StaticCache

import fp8_compile

WIDTH, INNER, CHOSEN, CONTEXT, VOCABULARY = 1024, 768, 8, 256, 32000
CONTENDERS = ("inductor bf16", "inductor bf16, batched_mm", "nvfp4", "nvfp4, batched_mm", "fp8")


def mixture(layers: int, experts: int, implementation: str) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        moe_intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=experts,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=CONTEXT,
        dtype=torch.bfloat16,
        experts_implementation=implementation,
    )
    with torch.device("cpu"):
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


class Decoder:
    """One token in, the next one out."""

    def __init__(self, name: str, layers: int, experts: int) -> None:
        implementation = "batched_mm" if "batched_mm" in name else "grouped_mm"
        self.model, self.times = mixture(layers, experts, implementation), list[float]()
        format = name.partition(",")[0]
        if format in ("nvfp4", "fp8"):
            method = "rtn" if format == "nvfp4" else None
            fp8_compile.pack(self.model, format, method=method, progress=False)
        self.bytes = sum(tensor.nbytes for tensor in self.model.state_dict().values())
        self.cache = StaticCache(config=self.model.config, max_cache_len=CONTEXT)
        self.token = torch.zeros(1, 1, dtype=torch.int64)
        self._next(self.model, 0)  # the cache allocates itself, outside of graphs
        self.step: nn.Module = torch.compile(self.model, backend="fp8" if format in ("nvfp4", "fp8") else "inductor")

    def decode(self, tokens: int) -> float:
        """Tokens a second."""
        self.cache.reset()
        start = time.perf_counter()
        for position in range(tokens):
            self._next(self.step, position)
        return tokens / (time.perf_counter() - start)

    @torch.no_grad()
    def _next(self, step: nn.Module, position: int) -> None:
        positions = torch.tensor([[position]])
        self.token = step(
            self.token, position_ids=positions, past_key_values=self.cache, use_cache=True
        ).logits.argmax(-1)


def measure(tokens: int, rounds: int, layers: int, experts: int) -> list[dict[str, Any]]:
    decoders = {name: Decoder(name, layers, experts) for name in CONTENDERS}
    for one in decoders.values():
        one.decode(3)  # compiles
    for _ in range(rounds):
        for one in decoders.values():
            one.times.append(one.decode(tokens))
    base = statistics.median(decoders[CONTENDERS[0]].times)
    return [
        {"name": name, "tokens_per_second": speed, "x": speed / base, "bytes": decoders[name].bytes}
        for name, speed in ((name, statistics.median(one.times)) for name, one in decoders.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 32), ("rounds", 5), ("layers", 4), ("experts", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = measure(arguments.tokens, arguments.rounds, arguments.layers, arguments.experts)
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"Qwen3-MoE, {arguments.layers} layers, d={WIDTH}, {CHOSEN} of {arguments.experts} experts, one sequence")
    for row in rows:
        print(
            f"  {row['name']:28}{row['tokens_per_second']:9.1f} tokens/s{row['x']:8.2f} x {CONTENDERS[0]}"
            f"{row['bytes'] / 1e6:10.0f} MB"
        )


if __name__ == "__main__":
    main()
