"""A model of the zoo, compiled once and used by many sequences, with its reference."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from zoo import ZOO

import fp8_compile
from fp8_compile.scaling.find_state import states_within

SEED = 0


class Subject:
    """The compiled model, its optimizer, and the twin that is never compiled, in FP64."""

    def __init__(self, name: str, backend: Any, *, dynamic: bool | None = None) -> None:
        self.name = name
        torch.manual_seed(SEED)
        self.model = ZOO[name]()
        self.twin = copy.deepcopy(self.model).double()
        self.twin.recomputes = False
        self.first_weights = copy.deepcopy(self.model.state_dict())
        self.training: Any = None

        def compiled(module: nn.Module) -> nn.Module:
            module.compile(backend=backend, dynamic=dynamic)
            return module

        self.entries = self.model.entries(compiled)
        self.twin_entries = self.twin.entries(lambda module: module)
        self.restart(adam=False)

    def restart(self, *, adam: bool) -> None:
        """As new, except that compiled code stays."""
        self.detach()
        self.load_weights(self.first_weights)
        for state in states_within(self.model).values():
            state.reset()
        parameters = self.model.parameters()
        self.optimizer = torch.optim.Adam(parameters, lr=1e-2) if adam else torch.optim.SGD(parameters, lr=0.1)
        self.saved: tuple[dict[str, Tensor], list[dict[str, Tensor]]] | None = None

    def load_weights(self, weights: dict[str, Tensor], factor: float = 1.0) -> None:
        self.model.load_state_dict({name: tensor * factor for name, tensor in weights.items()})

    def average(self, factor: float) -> dict[str, Tensor]:
        """Other weights put in through ``.data``, as libraries for moving averages do; returns the model's own."""
        own = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.put({name: self.first_weights[name] * factor for name in own})
        return own

    def put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(weights[name])

    def scaling(self) -> list[dict[str, Tensor]]:
        return [state.state_dict() for state in states_within(self.model).values()]

    def load_scaling(self, saved: list[dict[str, Tensor]]) -> None:
        for state, one in zip(states_within(self.model).values(), saved):
            state.load_state_dict(one)

    def save(self) -> None:
        self.saved = copy.deepcopy(self.model.state_dict()), self.scaling()

    def resume(self) -> None:
        if self.saved is not None:
            weights, scaling = self.saved
            self.load_weights(weights)
            self.load_scaling(scaling)

    def toggle_attached(self) -> None:
        if self.training is None:
            self.training = fp8_compile.attach(self.model, self.optimizer)
        else:
            self.detach()

    def detach(self) -> None:
        if self.training is not None:
            self.training.detach()
            self.training = None

    def step(self, gradients: list[dict[str, Tensor]]) -> None:
        """A step of the optimizer with the sum of the gradients, clipped as in real training."""
        for name, parameter in self.model.named_parameters():
            found = [one[f"grad of {name}"] for one in gradients if f"grad of {name}" in one]
            parameter.grad = torch.stack(found).sum(0) if found else None
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if norm.isfinite():
            self.optimizer.step()
        self.model.zero_grad()

    def synchronize(self) -> None:
        """Give the twin the weights of the model."""
        with torch.no_grad():
            for own, twin in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                twin.copy_(own)
