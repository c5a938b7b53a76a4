"""New weights into packed modules, in place: compiled code and running calls keep the tensors that they have."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import Tensor, nn

from fp8_compile.kernels.nvfp4.ops import from_standard

from .formats import NVFP4, format_of
from .linear_layers import unwrapped
from .packed_experts import PackedStack
from .packed_linear import NVFP4Linear, PackedLinear
from .packed_weight import NVFP4Parts, PackedWeight

METHOD = "rtn"


@torch.no_grad()
def update_packed(packed: nn.Module, state_dict: Mapping[str, Tensor]) -> list[str]:
    """Quantize the weights of a ``state_dict`` of the model as it was before packing, into the packed modules.

    Codes and scales are written to the tensors that are there, rounded to nearest, with one global scale for q/k/v and
    gate/up as ``pack`` has it; what is not packed is copied. Nothing is written before all names and shapes are known
    to fit. ``state_dict`` may have a part of the model; names may have peft's ``base_layer``, or not. Returns the names
    of what was quantized. Static scales of inputs stay.
    """
    root = unwrapped(packed)
    state_dict = {name.replace(".base_layer.", "."): value for name, value in state_dict.items()}
    layers, plain = _targets(root), _plain(root)
    sharded = next((name for name in state_dict if name in layers and layers[name].is_sharded), None)
    if sharded is not None:
        raise ValueError(
            f"{sharded}: its codes are sharded; expected new weights, or merge_adapters, before fully_shard, "
            "or in a model of one process that has loaded the checkpoint"
        )
    new = {name: _matrices(name, layers[name], value) for name, value in state_dict.items() if name in layers}
    for name, value in state_dict.items():
        if name not in layers:
            _check_plain(name, value, plain)
    scales = _global_scales({name: layers[name] for name in new}, new)
    _part_from_siblings(layers, set(new))
    seen: set[int] = set()
    for name, value in new.items():
        module = layers[name]
        first = getattr(module, module.packed[0])
        if first.data_ptr() not in seen:  # tied weights share their tensors
            seen.add(first.data_ptr())
            _write(module, value, name, scales.get(name))
    for name, value in state_dict.items():
        if name not in layers:
            plain[name].copy_(value)
    return list(new)


def _targets(root: nn.Module) -> dict[str, PackedWeight]:
    """Packed modules by the name that their weight had."""
    found: dict[str, PackedWeight] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        name = f"{name}.".replace(".base_layer.", ".").rstrip(".")
        if isinstance(module, PackedLinear):
            found[f"{name}.weight".lstrip(".")] = module
        elif isinstance(module, PackedStack):
            found[name.removesuffix("_packed")] = module
    return found


def _plain(root: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that are not packed."""
    tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False)]
    packed = {id(getattr(module, name)) for module in _targets(root).values() for name in module.packed}
    return {name.replace(".base_layer.", "."): value for name, value in tensors if id(value) not in packed}


def _matrices(name: str, module: PackedWeight, value: Tensor) -> Tensor:
    """The weight as the module's format wants it: [N, K], or [E, N, K]."""
    if isinstance(module, PackedStack):
        wanted: tuple[int, ...] = module.shape
    else:
        assert isinstance(module, PackedLinear)
        wanted = module.out_features, module.in_features
    given = value.transpose(-2, -1) if getattr(module, "transposed", False) else value
    if tuple(given.shape) != wanted or not value.is_floating_point():
        expected = (*wanted[:-2], wanted[-1], wanted[-2]) if getattr(module, "transposed", False) else wanted
        raise ValueError(
            f"{name}: expected floats of shape {tuple(expected)}, the weight before it was packed, got {value.dtype} "
            f"of shape {tuple(value.shape)}; take the state_dict of the model that was packed"
        )
    return given.detach()


def _check_plain(name: str, value: Tensor, plain: Mapping[str, Tensor]) -> None:
    if name not in plain:
        raise ValueError(
            f"{name}: the packed model has no such weight; expected names of the model before it was packed, such as "
            f"{next(iter(plain), 'none')}"
        )
    if plain[name].shape != value.shape:
        raise ValueError(f"{name}: expected shape {tuple(plain[name].shape)}, got {tuple(value.shape)}")


def _part_from_siblings(layers: Mapping[str, PackedWeight], updated: set[str]) -> None:
    """Give layers global scales of their own where they share one with a layer that keeps its weight."""
    others = [one for name, one in layers.items() if name not in updated]
    kept = {one.global_scale.data_ptr() for one in others if isinstance(one, NVFP4Linear)}
    for name in updated:
        module = layers[name]
        if isinstance(module, NVFP4Linear) and module.global_scale.data_ptr() in kept:
            module.global_scale = module.global_scale.clone()


def _global_scales(layers: Mapping[str, PackedWeight], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What layers that servers fuse have in common, of those that are updated."""
    names = [
        name.removesuffix(".weight") for name, module in layers.items() if isinstance(module, NVFP4Linear)
    ]
    shared = NVFP4.shared_scales(names, lambda name: new[f"{name}.weight"], METHOD)
    return {f"{name}.weight": scale for name, scale in shared.items()}


def _write(module: PackedWeight, value: Tensor, name: str, shared: Tensor | None) -> None:
    """Quantize and store, in the layout and in the tensors that the module has."""
    matrices = value if isinstance(module, PackedStack) else value[None]
    for expert, matrix in enumerate(matrices):
        parts = _parts(module, matrix, name, shared)
        for own, part in zip(module.packed, parts):
            target: Tensor = getattr(module, own)
            into = target[expert] if isinstance(module, PackedStack) else target
            into.copy_(part.reshape(into.shape))


def _parts(module: PackedWeight, matrix: Tensor, name: str, shared: Tensor | None) -> tuple[Any, ...]:
    format = format_of(module)
    options = {"block_size": module.block_size} if isinstance(module, NVFP4Parts) else {}
    home = getattr(module, module.packed[0]).device
    quantized = format.quantize(matrix.to(home), METHOD, None, name=name, shared=shared, **options)
    if isinstance(module, NVFP4Parts):
        codes, block_scales = from_standard(quantized.codes, quantized.block_scales, module.layout)
        return codes, block_scales, quantized.global_scale
    return quantized.codes, quantized.scales
