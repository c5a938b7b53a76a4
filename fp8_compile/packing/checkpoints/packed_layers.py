"""Which layers of a checkpoint are packed, and in which format and layout: told by the names of its tensors."""

from __future__ import annotations

import logging
from typing import Any, Collection, Mapping, NamedTuple, Sequence

from torch import Tensor

from fp8_compile.packing.formats import FORMATS, Format

from .layouts import Layout

log = logging.getLogger("fp8_compile")
# Scales of inputs that tools store beside a packed weight. We use some of them; none is a tensor of the model.
OF_INPUTS = ("input_scale", "input_global_scale")
# Scales of an FP8 key-value cache, beside k_proj and v_proj or in the attention module.
OF_CACHE = ("k_scale", "v_scale", "q_scale")
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


def without_cache_scales(tensors: Mapping[str, Tensor], own: Collection[str], used: bool = False) -> dict[str, Tensor]:
    """The tensors of a checkpoint without the scales of a key-value cache; a log line counts them unless they are
    ``used``. ``own`` are the model's tensors, which are not taken for such scales."""
    scales = [name for name in tensors if name.rpartition(".")[2] in OF_CACHE and name not in own]
    if scales and not used:
        say_unused(scales)
    return {name: tensor for name, tensor in tensors.items() if name not in set(scales)}


def say_unused(scales: Sequence[str]) -> None:
    log.info(
        "%s and %d other scales of an FP8 key-value cache are not used; kv_cache='fp8_static' uses them",
        *(scales[0], len(scales) - 1),
    )


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
