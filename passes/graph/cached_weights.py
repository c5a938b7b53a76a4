"""FP8 copies of weights that a model keeps: how a graph reads them, and the names of their placeholders."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch
from torch import fx

from fp8_compile.torch_internals.aot import named_inputs

from .slot import TensorUse

PREFIX = "fp8_weight_"
CODES, TRANSPOSED, SCALES = "codes", "transposed", "scales"


@dataclasses.dataclass(frozen=True)
class Use:
    """How a graph reads a weight: ``argument`` is its place among the graph's arguments, ``via`` the dtype that it is
    rounded to first (autocast)."""

    argument: int
    tensor: TensorUse
    via: torch.dtype | None


class CachedWeights(Protocol):
    """What passes ask of the cache; ``fp8_compile.scaling.graph_weights`` answers."""

    def use(self, use: Use) -> bool:
        """The graph reads the copy of a weight from now on; False if there is no such copy."""
        ...


def weight_input(index: int, field: str) -> str:
    """The name of an FP8 copy of the weight that is argument ``index``, or of its scales."""
    return f"{PREFIX}{index}_{field}"


def weight_inputs(graph: fx.Graph) -> dict[str, fx.Node]:
    """The placeholders of a graph that hold copies of weights and their scales, by name."""
    return {name: node for name, node in named_inputs(graph).items() if name.startswith(PREFIX)}
