"""Mixtures of experts as transformers writes them: modules whose weights are stacks with one matrix per expert.

    gate_up_proj, or up_proj where there is no gate; down_proj          [E, N, K], or [E, K, N] where is_transposed

They are known by what ``use_experts_implementation`` (transformers/integrations/moe.py) leaves on a module.
"""

from __future__ import annotations

import dataclasses
from typing import Iterator

import torch
from torch import Tensor, nn

from .linear_layers import parameter_of

STACKS = ("gate_up_proj", "up_proj", "down_proj")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class ExpertStack:
    """One stack of a module, a parameter until it is packed."""

    module: nn.Module
    name: str  # in the module

    @property
    def parameter(self) -> nn.Parameter:
        return parameter_of(self.module, self.name)

    @property
    def transposed(self) -> bool:
        return bool(self.module.is_transposed)

    @property
    def matrices(self) -> Tensor:
        """The weights as [E, N, K]."""
        weight = self.parameter.detach()
        return weight.transpose(1, 2) if self.transposed else weight

    def reason_against_packing(self) -> str | None:
        if type(self.parameter) is not nn.Parameter:
            return f"its weight is a {type(self.parameter).__name__}"
        if self.parameter.dtype not in DTYPES:
            return f"dtype {str(self.parameter.dtype).removeprefix('torch.')}"
        return None


def is_experts(module: nn.Module) -> bool:
    return all(isinstance(vars(module).get(name), bool) for name in ("is_transposed", "is_concatenated", "has_gate"))


def expert_stacks(root: nn.Module) -> dict[str, ExpertStack]:
    """Every stack that is not packed, by its dotted name."""
    return {f"{name}.{stack.name}".strip("."): stack for name, stack in _stacks(root)}


def _stacks(root: nn.Module) -> Iterator[tuple[str, ExpertStack]]:
    for name, module in root.named_modules():
        if is_experts(module):
            for own in STACKS:
                parameter = module._parameters.get(own)
                if parameter is not None and parameter.dim() == 3 and parameter.shape[0]:
                    yield name, ExpertStack(module, own)
