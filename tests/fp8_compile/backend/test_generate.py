"""Generation as gpt-fast does it: buffers of keys and values written in place, a prefill graph, a graph for one token.

A prompt gives the same tokens whatever was generated or trained before, as long as the weights are the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from uncompiled import UncompiledBackend

import fp8_compile

D, HEADS, VOCABULARY, LENGTH = 64, 2, 96, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.wo = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.register_buffer("keys", torch.zeros(1, HEADS, LENGTH, D // HEADS), persistent=False)
        self.register_buffer("values", torch.zeros(1, HEADS, LENGTH, D // HEADS), persistent=False)

    def forward(self, x: Tensor, mask: Tensor, position: Tensor | None) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (t.view(batch, time, HEADS, -1).transpose(1, 2) for t in self.wqkv(x).split(D, -1))
        if position is not None:
            self.keys[:, :, position], self.values[:, :, position] = k, v
            k, v = self.keys, self.values
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(batch, time, D))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp_norm = Attention(), nn.RMSNorm(D), nn.RMSNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D, bias=False), nn.Linear(2 * D, D, bias=False)

    def forward(self, x: Tensor, mask: Tensor, position: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm(x), mask, position)
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(D), nn.Linear(D, VOCABULARY, bias=False)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool(), persistent=False)

    def forward(self, tokens: Tensor, position: Tensor | None = None) -> Tensor:
        mask = (
            self.mask[None, None, position] if position is not None else self.mask[: tokens.shape[1], : tokens.shape[1]]
        )
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask, position)
        return self.output(self.norm(x))


class Generator:
    """gpt-fast's ``generate()``: two compiled functions that get the model; temperature 0 is greedy."""

    def __init__(self, model: Transformer, backend: Any) -> None:
        self.model = model
        self.prefill = torch.compile(self._prefill, backend=backend, fullgraph=True, dynamic=True)
        self.decode = torch.compile(self._decode, backend=backend, fullgraph=True)

    @staticmethod
    def _prefill(model: Transformer, tokens: Tensor, position: Tensor) -> Tensor:
        return model(tokens, position)[0, -1]

    @staticmethod
    def _decode(model: Transformer, token: Tensor, position: Tensor) -> Tensor:
        return model(token, position)[0, -1]

    @torch.no_grad()
    def __call__(self, prompt: Tensor, new: int = 12, temperature: float = 0.0) -> tuple[list[int], Tensor]:
        """The new tokens, and the logits of all of them."""
        noise = torch.Generator().manual_seed(5)
        logits = [self.prefill(self.model, prompt[None], torch.arange(len(prompt)))]
        tokens = [self._choose(logits[-1], temperature, noise)]
        for position in range(len(prompt), len(prompt) + new - 1):
            logits.append(self.decode(self.model, torch.tensor([[tokens[-1]]]), torch.tensor([position])))
            tokens.append(self._choose(logits[-1], temperature, noise))
        return tokens, torch.stack(logits)

    @staticmethod
    def _choose(logits: Tensor, temperature: float, noise: torch.Generator) -> int:
        if not temperature:
            return int(logits.argmax())
        likely = torch.softmax(logits.float() / temperature, -1)
        exponential = torch.empty_like(likely).exponential_(1, generator=noise)
        return int((likely / exponential).argmax())


def train(model: Transformer, backend: Any, steps: int) -> None:
    """Steps that change no weight, on data that are larger every time."""
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = fp8_compile.attach(compiled, optimizer)
    for step in range(steps):
        tokens = torch.randint(0, VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(step))
        (F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()) * 10.0**step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert training.steps == steps


def check_repeats(backend: Any, layers: int = 2) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Transformer(layers)
    generate = Generator(model, backend)
    prompts = [
        torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)) for length in (5, 9)
    ]
    first = {(i, t): generate(prompts[i], temperature=t) for i in (0, 1) for t in (0.0, 0.8)}
    assert first[0, 0.0][0] != first[1, 0.0][0] and first[0, 0.0][0] != first[0, 0.8][0]
    assert len(set(first[0, 0.8][0])) > 3, "it says something"

    def again(order: list[int]) -> None:
        for i in order:
            for temperature in (0.0, 0.8):
                tokens, logits = generate(prompts[i], temperature=temperature)
                assert tokens == first[i, temperature][0]
                assert torch.equal(logits, first[i, temperature][1]), "bit for bit"

    again([0, 0, 1, 0])
    with torch.no_grad():
        generate(prompts[0].flip(0)), generate(torch.zeros(9, dtype=torch.int64))
    again([1, 0])
    train(model, backend, 3)
    again([0, 1])


def test_a_prompt_gives_the_same_tokens_whatever_ran_before() -> None:
    check_repeats(UncompiledBackend())


def test_compiled_code_gives_the_same_tokens_too() -> None:
    """Compiles a prefill of any length, a decoding and training, in some 12 seconds: a second layer has the same code,
    and would take as long again."""
    check_repeats("fp8", layers=1)
