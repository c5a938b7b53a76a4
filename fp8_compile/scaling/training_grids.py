"""How the training of a model quantizes its weights: noted when a training graph first runs for them.

``pack(model, scales="training")`` asks for it. It is known by parameter, so that it does not matter whether a model was
compiled as a whole, block by block, or inside of a function.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fp8_compile.kernels.delayed_scaling import fits
from fp8_compile.kernels.formats import format_named
from fp8_compile.passes.graph.slot import Slot
from fp8_compile.passes.graph.weight_grid import WeightGrid

from .layout import Prefix, moved

if TYPE_CHECKING:
    from .graph_slots import GraphSlots
    from .state import ScalingState


@dataclasses.dataclass(frozen=True)
class TrainingGrid:
    """The grid of one weight, and where the scaling state keeps the scales that come from earlier steps."""

    recipe: str
    format: str
    via: torch.dtype | None  # what the weight is rounded to first, by autocast
    four_over_six: bool
    state: weakref.ref[ScalingState] | None = None  # None: every scale is the tensor's own
    weight: Slot | None = None
    input: Slot | None = None

    def is_like(self, other: TrainingGrid) -> bool:
        """True if both are of one training: the same but for the slots of another use of the weight."""
        return dataclasses.replace(self, weight=None, input=None) == dataclasses.replace(
            other, weight=None, input=None
        )

    def weight_scale(self, weight: Tensor) -> Tensor | None:
        """The quant_scale that a training forward now would use, fp32 []. None: the weight's own, since there is no
        history, or since the weight has outgrown it."""
        state = self.state() if self.state is not None else None
        if state is None or self.weight is None:
            return None
        if state.weights is not None and (scale := state.weights.scales().get(self.weight)) is not None:
            return scale
        scale, amax = state.scale_of(self.weight), weight.detach().abs().amax().to(torch.float32)
        if scale is None or (amax > 0 and not fits(amax * scale, format_named(self.format).max)):
            return None
        return scale

    def input_scale(self) -> Tensor | None:
        """The same of the input; None: its own, or it has none yet."""
        state = self.state() if self.state is not None else None
        return None if state is None or self.input is None else state.scale_of(self.input)


def note_grids(
    grids: Sequence[WeightGrid],
    args: Sequence[Any],
    state: ScalingState | None = None,
    slots: GraphSlots | None = None,
    prefix: Prefix | None = None,
) -> None:
    """A training graph runs with these arguments. ``state``, ``prefix``: of the module that it runs for."""
    for grid in grids:
        noted = TrainingGrid(grid.recipe, grid.format, grid.via, grid.four_over_six)
        if grid.delayed and state is not None and slots is not None and prefix is not None:
            uses = (moved(use, slots.prefix, prefix) for use in (grid.weight, grid.input))
            weight, read = (state.slot_of(use, slots.layout.frame) for use in uses)
            noted = dataclasses.replace(noted, state=weakref.ref(state), weight=weight, input=read)
        known = [one for one in grids_of(args[grid.argument]) if one.is_like(noted)]
        _noted[args[grid.argument]] = known if noted in known else [*known, noted]


def grids_of(parameter: Tensor) -> list[TrainingGrid]:
    """Those of a weight, one for each of its uses; nothing if no training forward has quantized it."""
    found: list[TrainingGrid] = _noted.get(parameter, [])
    return found


_noted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> its grids
