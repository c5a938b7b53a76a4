"""What an FP8 cache of keys and values costs: perplexity and KL divergence against an exact cache.

    python benchmarks/fp8_cache_quality.py --steps 200

The model is a small Llama that learns this repository's documents byte by byte first, so that its attention has
something to look for; the text that is measured was not learned. Every token is predicted through the cache.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from fp8_compile import Fp8Cache

DOCS = pathlib.Path(__file__).parent.parent / "docs"
LENGTH, BATCH = 128, 16


def text() -> Tensor:
    every = b"".join(file.read_bytes() for file in sorted(DOCS.glob("*.md")))
    return torch.frombuffer(bytearray(every), dtype=torch.uint8)


def learned(train: Tensor, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, head_dim=32, vocab_size=256, max_position_embeddings=LENGTH)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = windows(train, BATCH)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def windows(data: Tensor, count: int) -> Tensor:
    starts = torch.randint(0, len(data) - LENGTH, (count,)).tolist()
    return torch.stack([data[start : start + LENGTH] for start in starts]).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    data = text()
    cut = len(data) * 9 // 10
    model = learned(data[:cut], steps)
    held_out, seen = windows(data[cut:], 32), windows(data[:cut], 8)
    caches = {
        "exact": DynamicCache(config=model.config),
        "fp8, a scale per token": Fp8Cache(model),
        "fp8, static scales": Fp8Cache(model, scales=Fp8Cache.calibrate(model, [seen])),
    }
    exact = model(held_out, past_key_values=caches.pop("exact")).logits[:, :-1].log_softmax(-1)
    print(f"{'exact cache':24}perplexity {perplexity(exact, held_out):.4f}")
    for name, cache in caches.items():
        found = model(held_out, past_key_values=cache).logits[:, :-1].log_softmax(-1)
        divergence = F.kl_div(found, exact, reduction="none", log_target=True).sum(-1).mean()
        print(f"{name:24}perplexity {perplexity(found, held_out):.4f}   KL {divergence:.2e} nats per token")


def perplexity(logits: Tensor, ids: Tensor) -> float:
    return float(F.nll_loss(logits.flatten(0, 1), ids[:, 1:].flatten()).exp())


if __name__ == "__main__":
    main()
