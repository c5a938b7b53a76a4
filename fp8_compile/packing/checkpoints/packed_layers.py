"""Which layers of a checkpoint are packed, and in which format and layout: told by the names of its tensors."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple

from torch import Tensor

from fp8_compile.packing.formats import FORMATS, Format

from .layouts import Layout

# Scales of inputs that tools store beside a packed weight. We use some of them; none is a tensor of the model.
OF_INPUTS = ("input_scale", "input_global_scale")
LAYOUTS = tuple(dict.fromkeys(layout.name for format in FORMATS.values() for layout in format.layouts))


class Stored(NamedTuple):
    """How a layer's weight is stored."""

    format: Format[Any]
    layout: Layout[Any]

    def tensor_names(self, layer: str) -> list[str]:
        """The tensors that may belong to the packed weight and to its inputs."""
        return [f"{layer}.{part}" for part in (*self.layout.parts, *OF_INPUTS)]


def packed_layers(names: Mapping[str, Any]) -> dict[str, Stored]:
    """The layers with packed weights among a checkpoint's tensors."""
    every = [Stored(format, layout) for format in FORMATS.values() for layout in format.layouts]
    found = {}
    for key in names:
        layer, _, part = key.rpartition(".")
        for stored in every:
            if stored.layout.is_told_by(layer, part, names):
                found[layer] = stored
    return found


def read_layers(found: Mapping[str, Stored], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The weight of each layer."""
    return {layer: stored.layout.read(layer, tensors) for layer, stored in found.items()}


def check_whole(found: Mapping[str, Stored], names: Mapping[str, Any], where: Mapping[str, Any]) -> None:
    """Raise where a layer lacks a part; ``where`` has the file that each tensor is in."""
    for layer, (_, layout) in found.items():
        lacking = [part for part in layout.parts if f"{layer}.{part}" not in names]
        there = [part for part in layout.parts if f"{layer}.{part}" in names]
        if lacking:
            file = where.get(f"{layer}.{there[0]}", "the checkpoint")
            raise ValueError(
                f"{file}: {layer} has {', '.join(there)}, but no file of the checkpoint has its {', '.join(lacking)}; "
                "copy the checkpoint again, or save it again"
            )
