"""A small byte-level language model and real text for it: what the examples and benchmarks train.

The text is the Python standard library's own source, which every machine that runs this has.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


class Attention(nn.Module):
    """Causal self-attention, [batch, time, d] to the same."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d, d, bias=False)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._by_head(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))

    def _by_head(self, x: Tensor) -> Tensor:
        """[batch, time, d] to [batch, heads, time, d / heads]"""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, d: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(d, hidden, bias=False)
        self.up_proj = nn.Linear(d, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, hidden: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(d)
        self.attention = Attention(d, heads)
        self.mlp_norm = nn.RMSNorm(d)
        self.mlp = SwiGLU(d, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ByteLM(nn.Module):
    """A decoder over bytes; ``model(tokens, targets)`` is the mean cross-entropy in nats per byte."""

    def __init__(self, layers: int = 4, d: int = 512, heads: int = 8, hidden: int | None = None, context: int = 256):
        super().__init__()
        if d % heads:
            raise ValueError(f"d must be a multiple of heads, got d={d}, heads={heads}")
        self.context = context
        self.embedding = nn.Embedding(BYTES, d)
        self.position = nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads, hidden or 4 * d) for _ in range(layers))
        self.norm = nn.RMSNorm(d)
        self.lm_head = nn.Linear(d, BYTES, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: int64 [batch, time], time at most ``context``."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def stdlib_text(max_bytes: int = 8_000_000) -> Tensor:
    """The standard library's modules, one after another in the order of their names: uint8 [at most max_bytes]."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            text += path.read_bytes()
        except OSError:  # a few files more or less make no difference
            continue
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError("this Python has no readable standard library sources to train on")
    return torch.frombuffer(text, dtype=torch.uint8)[:max_bytes].clone()


def batches(text: Tensor, *, batch: int, time: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of ``text`` without end: (tokens, targets), each int64 [batch, time], targets one byte on."""
    if len(text) <= time:
        raise ValueError(f"text of {len(text)} bytes is too short for windows of time={time} and one byte more")
    offsets = torch.arange(time + 1)
    while True:
        starts = torch.randint(len(text) - time, (batch, 1), generator=generator)
        windows = text[starts + offsets].long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
