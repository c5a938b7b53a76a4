"""Save packed models as other tools read them, and read theirs.

folder/config.json                       the model's own, with "quantization_config"
folder/model.safetensors                 or model-00001-of-00002.safetensors, ... and model.safetensors.index.json
folder/hf_quant_config.json              layout="modelopt"
folder/model.gguf                        layout="gguf"
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
from typing import Any, Collection, Mapping

import torch
from torch import Tensor, nn

from fp8_compile.kernels.nvfp4.quantize import quantize_nvfp4
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.packing.input_scales import shared_scales
from fp8_compile.packing.linear_layers import fused_groups, linear_layers, unwrapped
from fp8_compile.packing.packed_experts import FP8Stack, PackedStack, replace_stack
from fp8_compile.packing.packed_linear import FP8Linear, NVFP4Linear, PackedLinear
from fp8_compile.packing.packed_weight import NVFP4Parts, PackedWeight
from fp8_compile.whole_files import write_json, write_safetensors

from . import layouts as layouts
from .experts import ExpertNames, join_plain, joined, parts_of, split_plain
from .files import INDEX, read_tensors, read_with_files, remove_others
from .fit import check_activations, check_experts, check_layer, check_others

log = logging.getLogger("fp8_compile")
LAYOUTS = (*layouts.LAYOUTS, "gguf")
SHARD_BYTES = 5_000_000_000
__all__ = ["load_checkpoint", "packed_stacks", "read_tensors", "save_checkpoint"]


def save_checkpoint(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: str = "compressed-tensors",
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a packed model to a folder. Layers that servers fuse (q/k/v, gate/up) share a global scale in it."""
    root, folder = unwrapped(model), pathlib.Path(folder)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; expected one of: {', '.join(LAYOUTS)}")
    packed = {name: one for name, one in root.named_modules() if isinstance(one, PackedLinear)}
    stacks = packed_stacks(root)
    if not packed and not stacks:
        raise ValueError(
            "save_checkpoint expects a packed model, this one has no packed layer; fp8_compile.pack it first"
        )
    weights = {name: one.nvfp4 for name, one in packed.items() if isinstance(one, NVFP4Linear)}
    if len({isinstance(one, NVFP4Parts) for one in (*packed.values(), *stacks.values())}) > 1:
        raise ValueError("the model has NVFP4 and FP8 layers; one checkpoint holds one format, pack it in one")
    inputs = _fp8_inputs(packed, stacks)
    _share_global_scales(weights)
    everywhere = dict(root.named_modules(remove_duplicate=False))  # a layer in two places has two names in state_dict()
    others = {name: tensor for name, tensor in root.state_dict().items() if not _is_packed(name, everywhere)}
    if layout == "gguf":
        if stacks:
            raise ValueError(f"{next(iter(stacks))}: no packed experts in layout='gguf'; exclude them, or use another")
        from .gguf import write_gguf

        write_gguf(root, folder / "model.gguf", packed, weights, others)
        return
    names = ExpertNames(root)
    tensors = split_plain(names, _without_twins(others))
    for name, layer in packed.items():
        if isinstance(layer, FP8Linear):
            tensors |= layouts.fp8_tensors(names.stored(name), layer.codes, layer.scales, layer.input_scale, layout)
        else:
            tensors |= layouts.nvfp4_tensors(names.stored(name), weights[name], layout)
    for stack, module in stacks.items():
        for name, part in names.of(stack).items():
            one = parts_of(module, part)
            if isinstance(one, NVFP4Weight):
                tensors |= layouts.nvfp4_tensors(name, one, layout)
            else:
                tensors |= layouts.fp8_tensors(name, *one, None, layout)
    (folder / "config.json").unlink(missing_ok=True)  # until the end the folder is no checkpoint
    remove_others(folder, _write_shards(folder, tensors, shard_bytes))
    ignore = [names.stored(name) for name in linear_layers(root) if name not in packed]
    ignore += [name for name, part in names.parts.items() if part.stack not in stacks]
    format = "nvfp4" if any(isinstance(one, NVFP4Parts) for one in (*packed.values(), *stacks.values())) else "fp8"
    if layout == "modelopt":
        write_json(folder / "hf_quant_config.json", layouts.modelopt_file(ignore))
    described = layouts.quantization_config(layout, format, ignore, inputs)
    config = _own_config(root) | {"quantization_config": described}
    write_json(folder / "config.json", config)


def _fp8_inputs(packed: Mapping[str, PackedLinear], stacks: Mapping[str, PackedStack]) -> dict[str, Any] | None:
    """How the inputs of FP8 layers are rounded, in compressed-tensors' words; of all alike, or it can't be said."""
    rounded = {name: layer for name, layer in packed.items() if isinstance(layer, FP8Linear)}
    kinds = {layer.inputs: name for name, layer in rounded.items()}
    experts = next((name for name, stack in stacks.items() if isinstance(stack, FP8Stack)), None)
    if experts is not None:
        kinds[""] = experts  # whose inputs are exact
    if len(kinds) > 1:
        named = "; ".join(f"{name}: {kind or 'exact'}" for kind, name in kinds.items())
        raise ValueError(f"one checkpoint holds one kind of inputs, got {named}; pack all layers alike")
    first = next(iter(rounded.values()), None)
    return layouts.FP8_INPUTS[first.input_scale is not None] if first is not None and first.activations else None


def load_checkpoint(
    model: nn.Module, folder: str | os.PathLike[str], *, activations: str | None = None, strict: bool = True
) -> nn.Module:
    """Load an NVFP4 or FP8 checkpoint, ours or another tool's, into a model of the same architecture, in place.

    Layers that are packed in the checkpoint become packed layers; all other tensors are loaded as they are.
    ``activations`` are ``pack``'s: "fp8" takes the static scales of the checkpoint where it has some.
    """
    root, folder = unwrapped(model), pathlib.Path(folder)
    tensors, where = read_with_files(folder)
    names = ExpertNames(root)
    found: dict[str, str] = layouts.packed_layers(tensors)
    layouts.check_whole(found, tensors, where)
    check_activations(found, activations)
    experts: dict[str, str] = {}
    stacks: dict[str, PackedStack] = {}
    if names.stacks:
        check_experts(names, tensors, found, where)
        stacks, experts = _read_experts(names, tensors, found)
        kept = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in experts}
        tensors = join_plain(names, kept)
        found = layouts.packed_layers(tensors)
        layouts.check_whole(found, tensors, where)
    modules = dict(root.named_modules())
    weights: dict[str, Any] = {}
    used: set[str] = set()
    for name, layout in found.items():
        weights[name] = layouts.read_layer(name, tensors, layout)
        check_layer(folder, name, modules.get(name), weights[name])
        used.update(f"{name}.{part}" for part in (*layouts.PARTS[layout], "input_scale", "input_global_scale"))
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    check_others(root, rest, where, folder)
    static = [name for name, layout in found.items() if layout == "fp8" and activations]
    given = {name: tensors[f"{name}.input_scale"] for name in static if f"{name}.input_scale" in tensors}
    input_scales = shared_scales({name: layouts.input_scale_from(name, one) for name, one in given.items()})
    # All was read and checked: from here on the model changes.
    for stack, packed in stacks.items():
        replace_stack(names.stacks[stack], stack.rpartition(".")[2], packed)
    for name, weight in weights.items():
        layer = modules[name]
        dtype = layer.dtype if isinstance(layer, PackedLinear) else layer.weight.dtype
        device = next(iter([*layer.parameters(), *layer.buffers()])).device
        if isinstance(weight, NVFP4Weight):
            NVFP4Linear.convert(layer, weight.to(device), dtype, activations)
        else:
            scale = input_scales[name].to(device) if name in input_scales else None
            FP8Linear.convert(layer, *(one.to(device) for one in weight), dtype, activations, scale)
    missing, unexpected = _load_others(root, rest, folder)
    filled = {id(modules[name]) for name in found} | {id(one) for one in packed_stacks(root, experts.values()).values()}
    everywhere = root.named_modules(remove_duplicate=False)
    inside = {name: module for name, module in everywhere if id(module) in filled}
    missing = [name for name in missing if not _is_packed(name, inside) and not _is_tied(root, name, rest)]
    if strict and (missing or unexpected):
        raise ValueError(f"{folder}: tensors missing: {missing or 'none'}; not of this model: {unexpected or 'none'}")
    return model


def _load_others(root: nn.Module, rest: dict[str, Tensor], folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """What ``load_state_dict`` says is missing, and what it does not know."""
    try:
        missing, unexpected = root.load_state_dict(rest, strict=False)
    except RuntimeError as error:  # of modules that look at what they are given by themselves
        raise ValueError(f"{folder}: the model does not take the checkpoint's tensors: {error}") from error
    return list(missing), list(unexpected)


def packed_stacks(root: nn.Module, names: Collection[str] | None = None) -> dict[str, PackedStack]:
    """The packed stacks of experts, or those of ``names``, by the names that they had as parameters."""
    found = {name.removesuffix("_packed"): one for name, one in root.named_modules() if isinstance(one, PackedStack)}
    return {name: one for name, one in found.items() if names is None or name in names}


def _read_experts(
    names: ExpertNames, tensors: Mapping[str, Tensor], found: Mapping[str, str]
) -> tuple[dict[str, PackedStack], dict[str, str]]:
    """The stacks that the checkpoint has packed, and its layers with the stack that each is of."""
    stacks: dict[str, PackedStack] = {}
    taken: dict[str, str] = {}
    for stack, module in names.stacks.items():
        layers = {layer: part for layer, part in names.parts.items() if part.stack == stack}
        if not any(layer in found for layer in layers):
            continue
        before = names.parameter(stack)
        device = next(iter([*module.parameters(), *module.buffers()])).device
        read = {layer: layouts.read_layer(layer, tensors, found[layer]) for layer in layers if layer in found}
        packed = joined(stack, layers, read, before.dtype, tuple(before.shape)).to(device)
        stacks[stack] = packed
        taken |= dict.fromkeys(layers, stack)
    return stacks, taken


def _share_global_scales(weights: dict[str, NVFP4Weight]) -> None:
    for group in fused_groups(weights):
        scales = [weights[name].global_scale for name in group]
        if all(torch.equal(scale, scales[0]) for scale in scales):
            continue
        shared = torch.stack([scale.cpu() for scale in scales]).amax()
        log.warning("%s: given one global scale, their block scales searched anew", ", ".join(group))
        for name in group:
            weights[name] = quantize_nvfp4(weights[name].dequantize(), "sweep", global_scale=shared, name=name)


def _is_packed(name: str, modules: Mapping[str, nn.Module]) -> bool:
    layer, _, part = name.rpartition(".")
    module = modules.get(layer)
    return isinstance(module, PackedWeight) and part in module.packed


def _without_twins(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One name for tensors that are tied, the first: as transformers saves them."""
    seen: dict[Any, str] = {}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not tensor.numel()
        or seen.setdefault((tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()), name) == name
    }


def _is_tied(root: nn.Module, name: str, given: Mapping[str, Tensor]) -> bool:
    """Whether a tensor that the checkpoint lacks is one that it has, under another name."""
    tensors = dict(root.state_dict(keep_vars=True))
    return any(tensors[other] is tensors[name] for other in given if other in tensors and other != name)


def _write_shards(folder: pathlib.Path, tensors: dict[str, Tensor], shard_bytes: int) -> list[str]:
    """The names of the files that were written."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(one.nbytes for one in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        write_safetensors(folder / "model.safetensors", shards[0])
        return ["model.safetensors"]
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards):
        write_safetensors(folder / name, shard)
    where = {tensor: name for name, shard in zip(names, shards) for tensor in shard}
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    return [*names, INDEX]


def _own_config(root: nn.Module) -> dict[str, Any]:
    config = getattr(root, "config", None)
    return json.loads(config.to_json_string(use_diff=False)) if hasattr(config, "to_json_string") else {}
