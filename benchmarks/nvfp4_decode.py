"""Tokens a second of a 12-layer, d=768 GPT that decodes one sequence: NVFP4 weights against Inductor's bf16.

Random weights: the time does not depend on them. The cache of keys and values has a fixed size and is written in place,
so that one graph serves every position.
"""

from __future__ import annotations

import statistics
import time
from typing import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8_compile

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 12, 768, 12, 256, 50304
ROUNDS = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, CONTEXT, WIDTH // HEADS), persistent=False)

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).view(1, 1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        attended = F.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(1, 1, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """One token in, the next one out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        x = self.tokens(token) + self.positions(position)
        mask = (torch.arange(CONTEXT) <= position).view(1, 1, 1, CONTEXT)
        for block in self.blocks:
            x = block(x, position, mask)
        return self.head(self.norm(x)).argmax(-1)


def variants() -> dict[str, Callable[..., Tensor]]:
    """Compiled models, each of its own weights."""

    def model() -> GPT:
        torch.manual_seed(0)
        return GPT().bfloat16().eval().requires_grad_(False)

    made: dict[str, Callable[..., Tensor]] = {"inductor bf16": torch.compile(model())}
    made["inductor fp32"] = torch.compile(model().float())
    # What the backend does for weights that are not packed: none of the gain over bf16 that this has is NVFP4's.
    made["fp8, nothing packed"] = torch.compile(model(), backend="fp8", options={"exclude": ("blocks.*", "head")})
    for name, activations in (("nvfp4 exact", None), ("nvfp4 int8", "int8")):
        packed = model()
        fp8_compile.pack(packed, method="rtn", include=("*",), activations=activations, progress=False)
        made[name] = torch.compile(packed, backend="fp8")
    packed = model()
    fp8_compile.pack(packed, method="rtn", include=("head", "*"), activations="int8", progress=False)
    made["nvfp4 int8, head too"] = torch.compile(packed, backend="fp8")
    return made


@torch.no_grad()
def decode(model: Callable[..., Tensor], tokens: int) -> float:
    """Tokens a second."""
    token = torch.zeros(1, 1, dtype=torch.int64)
    start = time.perf_counter()
    for position in range(tokens):
        token = model(token, torch.tensor([position]))
    return tokens / (time.perf_counter() - start)


def measure(tokens: int) -> dict[str, float]:
    models = variants()
    for model in models.values():
        decode(model, 4)  # compiles
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, model in models.items():
            found[name].append(decode(model, tokens))
    return {name: statistics.median(speeds) for name, speeds in found.items()}


def show(found: dict[str, float]) -> None:
    print(f"\nGPT, {LAYERS} layers, d={WIDTH}, {VOCABULARY} tokens, one sequence")
    base = found["inductor bf16"]
    for name, speed in found.items():
        print(f"  {name:24}{speed:9.1f} tokens/s{speed / base:8.2f} x inductor bf16")
