"""Small models, each with one way of using weights that scaling state has to get right.

``entries(compile)`` compiles what the user of such a model would compile, and returns what they would call. Compiled by
the identity, the same model is the reference.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 64
Compile = Callable[[nn.Module], nn.Module]
Entry = Callable[[Tensor], Tensor]


class Whole(nn.Module):
    """Compiled as a whole, called as a whole."""

    def entries(self, compile: Compile) -> list[Entry]:
        return [compile(self)]


class Block(nn.Module):
    """A residual MLP, normalized or not."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class NormMlp(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(norm=True), Block(norm=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Chain(Whole):
    """Nothing normalizes: a jump of the input runs through all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) * 2
        return x


class RawAcrossBreak(Whole):
    """Products that no module writes, in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH) * 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ self.first
        torch._dynamo.graph_break()
        return torch.relu(hidden) @ self.second


class UsedTwice(Whole):
    """One layer at two magnitudes in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.relu(self.layer(x)) * 200)


class UsedAcrossBreak(Whole):
    """One layer at two magnitudes in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.layer(x)) * 200
        torch._dynamo.graph_break()
        return self.layer(hidden)


class LoopWithBreak(Whole):
    """Blocks of one class that Dynamo compiles one by one, because it can't go on in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(norm=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * 30
            torch._dynamo.graph_break()
        return x


class CheckpointInside(Whole):
    recomputes = True  # not in the reference: the mode that simulates FP8 is off during backward

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(norm=True), Block(norm=False)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


class Parameters(Whole):
    """A ParameterList, whose entries have numbers and no names."""

    def __init__(self) -> None:
        super().__init__()
        weights = [torch.randn(WIDTH, WIDTH) / WIDTH**0.5 * factor for factor in (1, 50, 1 / 50)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.relu(x @ weight)
        return x


class FusedQkv(Whole):
    """Three slices of one weight, of different magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.tensor([1.0, 30.0, 1 / 30]).repeat_interleave(WIDTH)[:, None]
        self.weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / WIDTH**0.5 * scale)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (nn.functional.linear(x, part) for part in self.weight.chunk(3))
        return q + k / 30 + v * 30


class OptionalBranch(nn.Module):
    """Two graphs of one model that share a layer; one of them has another layer besides."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.branch = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, branch: bool = False) -> Tensor:
        hidden = self.body(x)
        return self.branch(torch.relu(hidden)) if branch else hidden

    def entries(self, compile: Compile) -> list[Entry]:
        model = compile(self)
        return [model, lambda x: model(x, branch=True)]


class RepeatedBlock(nn.Module):
    """A block that is compiled by itself and called several times per step, at different magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(norm=False)

    def entries(self, compile: Compile) -> list[Entry]:
        block = compile(self.block)

        def run(x: Tensor) -> Tensor:
            return block(x) + block(x * 100) / 100 + block(x / 100) * 100

        return [run]


class CheckpointOutside(nn.Module):
    """Compiled blocks that a checkpoint outside of them runs again."""

    recomputes = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(norm=True), Block(norm=False)])

    def entries(self, compile: Compile) -> list[Entry]:
        blocks = [compile(block) for block in self.blocks]

        def run(x: Tensor) -> Tensor:
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
            return x

        return [run]


class Head(nn.Module):
    """A model of its own on an encoder that it may share."""

    def __init__(self, encoder: nn.Module, factor: float) -> None:
        super().__init__()
        self.encoder, self.factor = encoder, factor
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(x * self.factor))


class SharedEncoder(nn.Module):
    """Two models that are compiled one by one and share a module."""

    def __init__(self) -> None:
        super().__init__()
        encoder = Block(norm=False)
        self.models = nn.ModuleList([Head(encoder, 1), Head(encoder, 100)])

    def entries(self, compile: Compile) -> list[Entry]:
        return [compile(model) for model in self.models]


class TwoOfOneClass(SharedEncoder):
    """Two models of one class that share nothing but their code."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.models = nn.ModuleList([Head(Block(norm=False), 1), Head(Block(norm=False), 100)])


ZOO: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        NormMlp, Chain, RawAcrossBreak, UsedTwice, UsedAcrossBreak, LoopWithBreak, CheckpointInside, Parameters,
        FusedQkv, OptionalBranch, RepeatedBlock, CheckpointOutside, SharedEncoder, TwoOfOneClass,
    )
}  # fmt: skip
# How many ways to call a model there are, where there is more than one.
ENTRIES = {"OptionalBranch": 2, "SharedEncoder": 2, "TwoOfOneClass": 2}
