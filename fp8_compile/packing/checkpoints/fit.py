"""Check that a checkpoint's tensors fit a model: all of them, before the model is changed."""

from __future__ import annotations

import pathlib
from typing import Any, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fp8_compile.packing.linear_layers import is_linear, weight_of
from fp8_compile.packing.packed_linear import PackedLinear
from fp8_compile.packing.packed_weight import Matrix

from .layouts import WIDE
from .packed_layers import Stored
from .stored_names import StoredNames

ARCHITECTURE = "load it into the architecture it was saved from"


def check_activations(found: Mapping[str, Stored], activations: str | None) -> None:
    """Raise where no packed layer can round its inputs so. Where a checkpoint has several formats, the layers of those
    that can't keep their inputs exact."""
    if not found or any(activations in format.activations for format, _ in found.values()):
        return
    name, (format, _) = next(iter(found.items()))
    expected = ", ".join(map(repr, format.activations))
    raise ValueError(f"{name}: activations={activations!r} with {format.name} weights; expected one of: {expected}")


def check_layer(folder: pathlib.Path, name: str, layer: nn.Module | None, weight: Matrix) -> None:
    """Raise unless a packed layer of the checkpoint is a linear layer of the model, of the same size."""
    if layer is None:
        raise ValueError(
            f"{folder}: the checkpoint packs {name}, which the model does not have; {ARCHITECTURE}"
        )
    if not isinstance(layer, PackedLinear) and not is_linear(layer):
        raise ValueError(
            f"{folder}: the checkpoint packs {name}, which is {type(layer).__name__} in the model, not a linear layer; "
            f"{ARCHITECTURE}"
        )
    packed = isinstance(layer, PackedLinear)
    expected = (layer.out_features, layer.in_features) if packed else tuple(weight_of(layer).shape)
    if weight.shape != expected:
        raise ValueError(
            f"{name}: the checkpoint has a weight of {list(weight.shape)}, the model's is {list(expected)}; "
            f"{ARCHITECTURE}"
        )


def check_experts(
    names: StoredNames, tensors: Mapping[str, Tensor], found: Mapping[str, Stored], where: Mapping[str, Any]
) -> None:
    """Raise unless experts that are not packed in the checkpoint are plain matrices of the stack's size."""
    for layer, part in names.parts.items():
        tensor = tensors.get(f"{layer}.weight")
        if tensor is None or layer in found:
            continue
        shape = tuple(names.parameter(part.stack).shape)
        _check_plain(layer, tensor, where[f"{layer}.weight"])
        if tuple(tensor.shape) != (shape[1] // part.halves, shape[2]):
            raise ValueError(
                f"{layer}: the checkpoint has a weight of {list(tensor.shape)}, the model's is "
                f"{[shape[1] // part.halves, shape[2]]}; {ARCHITECTURE}"
            )


def check_others(
    root: nn.Module, rest: Mapping[str, Tensor], where: Mapping[str, Any], folder: pathlib.Path
) -> None:
    """Raise unless tensors that are loaded as they are have the shape of what they replace, and are not codes that a
    scale belongs to."""
    own, modules = root.state_dict(keep_vars=True), dict(root.named_modules(remove_duplicate=False))
    for name, tensor in rest.items():
        layer, _, part = name.rpartition(".")
        file, target = where.get(name, folder), own.get(name)
        if isinstance(modules.get(layer), PackedLinear) and part == "weight":
            _check_plain(layer, tensor, file)
        if not isinstance(target, Tensor) or is_lazy(target):
            continue
        if tensor.dtype not in WIDE and tensor.dtype != target.dtype and _is_code(tensor, target):
            if part == "weight":
                _check_plain(layer, tensor, file)
            raise ValueError(
                f"{file}: {name} is stored as {_named(tensor)} codes, the model's is {_named(target)}: taken for "
                "numbers they would be wrong. Expected the model's dtype, or a layout that says how they are scaled"
            )
        single = not target.dim() and tensor.numel() == 1 and tensor.dim() == 1  # as torch's own loading takes it
        if tensor.shape != target.shape and not single:
            raise ValueError(
                f"{file}: {name} is stored as {list(tensor.shape)}, the model's is {list(target.shape)}; {ARCHITECTURE}"
            )


def _is_code(tensor: Tensor, target: Tensor) -> bool:
    """FP8 and bytes are codes wherever they would be converted; other integers where they would become fractions."""
    return tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool or target.is_floating_point()


def _check_plain(layer: str, tensor: Tensor, file: Any) -> None:
    """Raise unless a weight that is not packed holds numbers."""
    if tensor.dtype in WIDE:
        return
    lacking = "weight_scale and weight_scale_2" if tensor.dtype == torch.uint8 else "weight_scale"
    raise ValueError(
        f"{file}: {layer}.weight is stored as {_named(tensor)} codes, and no file of the checkpoint has {layer}'s "
        f"{lacking}; copy the checkpoint again, or save it again"
    )


def _named(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
