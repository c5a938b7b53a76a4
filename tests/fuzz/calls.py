"""One call of a model, the same for the engine and for the reference: inputs, outputs, gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, ContextManager, Mapping

import torch
from operations import Batch
from torch import Tensor, nn
from zoo import WIDTH, Entry

MODES: Mapping[str, Callable[[], ContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "grad": contextlib.nullcontext,
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A batch of tokens and what the outputs are to be."""

    x: Tensor
    target: Tensor
    input_grad: bool = False

    @classmethod
    def draw(cls, batch: Batch, seed: int, input_grad: bool = False) -> Call:
        generator = torch.Generator().manual_seed(seed)
        x, target = (torch.randn(batch.rows, WIDTH, generator=generator) for _ in range(2))
        chosen = seed % batch.rows
        if batch.kind == "one token":
            x[torch.arange(batch.rows) != chosen] = 0
        elif batch.kind == "outlier":
            x[chosen] *= 100
        elif batch.kind == "heavy tails":
            x = x.sign() * (2 * x.abs()).exp()
        elif batch.kind == "zeros":
            x.zero_()
        return cls(x * batch.magnitude, target, input_grad)

    def double(self) -> Call:
        return Call(self.x.double(), self.target.double(), self.input_grad)

    def input(self) -> Tensor:
        return self.x.clone().requires_grad_(self.input_grad)


def forward(entry: Entry, call: Call, mode: str) -> dict[str, Tensor]:
    """The output of a call that no backward follows."""
    with MODES[mode]():
        return {"output": entry(call.input()).detach().clone()}


def train(entry: Entry, model: nn.Module, calls: list[Call]) -> list[dict[str, Tensor]]:
    """Output and gradients of each call. All forwards come before the first backward."""
    inputs = [call.input() for call in calls]
    outputs = [entry(x) for x in inputs]
    return [_backward(model, *each) for each in zip(calls, inputs, outputs)]


def _backward(model: nn.Module, call: Call, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    nn.functional.mse_loss(y, call.target).backward()
    found = {"output": y.detach().clone(), "grad of the input": x.grad}
    found |= {f"grad of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
