"""How a training forward quantizes a weight and the input that it multiplies: what packing has to repeat."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import torch

from .slot import TensorUse

POWER_BLOCKS = "blockwise by powers of two"  # as compute capability 10.0 and newer multiply recipe="blockwise"


@dataclasses.dataclass(frozen=True)
class WeightGrid:
    """The grid of one weight in one graph.

    ``argument`` is the weight's place among the graph's arguments, ``recipe`` what it is quantized by there. ``via`` is
    the dtype that it is rounded to first (autocast). ``weight`` and ``input`` name the tensors whose scales come from
    earlier steps, where they do; an input that several products share is named by the first of them.
    """

    argument: int
    recipe: str
    format: str  # of the values: "e4m3", "e5m2", "e2m1"
    via: torch.dtype | None
    delayed: bool
    four_over_six: bool
    weight: TensorUse
    input: TensorUse

    def to_list(self) -> list[Any]:
        """Plain data for the report cache."""
        via = str(self.via).removeprefix("torch.") if self.via else None
        plain = [self.argument, self.recipe, self.format, via, self.delayed, self.four_over_six]
        return [*plain, list(dataclasses.astuple(self.weight)), list(dataclasses.astuple(self.input))]

    @classmethod
    def from_list(cls, stored: Sequence[Any]) -> WeightGrid:
        argument, recipe, format, via, delayed, four_over_six, weight, input = stored
        dtype = getattr(torch, via) if via else None
        uses = TensorUse.from_list(weight), TensorUse.from_list(input)
        return cls(argument, recipe, format, dtype, delayed, four_over_six, *uses)
