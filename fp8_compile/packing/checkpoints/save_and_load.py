"""Save packed models as other tools read them, and read theirs.

folder/config.json                       the model's own, with "quantization_config"
folder/generation_config.json            and the tokenizer's files, where there are some
folder/model.safetensors                 or model-00001-of-00002.safetensors, ... and model.safetensors.index.json
folder/hf_quant_config.json              layout="modelopt"
folder/model.gguf                        layout="gguf"
"""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import Any, Collection, Mapping, NamedTuple

import torch
from torch import Tensor, nn

from fp8_compile.packing.adapters import is_adapted
from fp8_compile.packing.calibration import Calibration
from fp8_compile.packing.input_scales import shared_scales
from fp8_compile.packing.linear_layers import unwrapped, weight_of
from fp8_compile.packing.packed_block_scaled import MXFP8Stack
from fp8_compile.packing.packed_experts import FP8Stack, PackedStack, replace_stack
from fp8_compile.packing.packed_linear import PackedLinear
from fp8_compile.packing.packed_weight import Matrix, PackedWeight
from fp8_compile.packing.use_fp8_cache import use_fp8_cache
from fp8_compile.whole_files import write_json

from .cache_scales import wanted_cache, without_cache_scales
from .complete_folder import check_tokenizer, own_config, write_other_files
from .experts import joined
from .files import INDEX, read_tensors, read_with_files, remove_others
from .fit import check_activations, check_experts, check_layer, check_others
from .gguf import write_gguf
from .gguf_vocabulary import CONVERTER
from .mxfp4 import PARTS as MXFP4_PARTS
from .mxfp4 import read_mxfp4
from .packed_layers import LAYOUTS, Stored, check_whole, packed_layers, read_layers
from .safetensors_writer import write_safetensors
from .stored_model import StoredModel, fuse_weights, stored_model
from .stored_names import StoredNames

SHARD_BYTES = 5_000_000_000
__all__ = ["load_checkpoint", "packed_stacks", "read_tensors", "save_checkpoint"]


def save_checkpoint(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: str = "compressed-tensors",
    tokenizer: Any = None,
    *,
    calibration: Calibration | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a packed model to a folder. Layers that servers fuse (q/k/v, gate/up) share a global scale in it.

    ``tokenizer`` is written beside the weights: with it the folder is complete, and "gguf" needs it. ``calibration``
    gives the inputs of NVFP4 layers a global scale, by which servers round them to NVFP4, too (W4A4); without it they
    round weights alone. docs/interchange.md says which programs read what.
    """
    root, folder = unwrapped(model), pathlib.Path(folder)
    if layout not in (*LAYOUTS, "gguf"):
        raise ValueError(f"layout={layout!r} is unknown; expected one of: {', '.join((*LAYOUTS, 'gguf'))}")
    check_tokenizer(tokenizer)
    if layout == "gguf":
        parts = _parts(root)
        if parts.stacks:
            raise ValueError(f"{next(iter(parts.stacks))}: layout='gguf' holds no experts; {CONVERTER}")
        names = StoredNames(root, of_its_checkpoint=False)  # the names that the gguf package knows
        weights = {home: rows.of(parts.weights, home) for home, rows in names.homes(parts.weights).items()}
        write_gguf(root, folder / "model.gguf", weights, names.store(parts.others), tokenizer)
        return
    stored = stored_as(root, layout, calibration)
    (folder / "config.json").unlink(missing_ok=True)  # until the end the folder is not a checkpoint
    remove_others(folder, _write_shards(folder, stored.tensors, shard_bytes))
    for file, data in stored.files.items():
        write_json(folder / file, data)
    write_other_files(root, folder, tokenizer)
    write_json(folder / "config.json", own_config(root) | {"quantization_config": stored.config})


class _Parts(NamedTuple):
    """A packed model: its layers and stacks, the weights of these layers, and all tensors that are not packed."""

    packed: dict[str, PackedLinear]
    stacks: dict[str, PackedStack]
    weights: dict[str, Matrix]
    others: dict[str, Tensor]


def _parts(root: nn.Module) -> _Parts:
    adapted = next((name for name, one in root.named_modules() if is_adapted(one)), None)
    if adapted is not None:
        raise ValueError(
            f"{adapted} has adapters beside its weight, which checkpoints of packed models don't hold; call "
            "fp8_compile.merge_adapters(model) and save model.unload(), or save the adapters by themselves "
            "(model.save_pretrained) and the model without them"
        )
    packed = {name: one for name, one in root.named_modules() if isinstance(one, PackedLinear)}
    stacks = packed_stacks(root)
    if not packed and not stacks:
        raise ValueError(
            "save_checkpoint expects a packed model, this one has no packed layer; fp8_compile.pack it first"
        )
    weights = {name: layer.matrix() for name, layer in packed.items()}
    fuse_weights(packed, weights)
    everywhere = dict(root.named_modules(remove_duplicate=False))  # a layer in two places has two names in state_dict()
    others = {name: tensor for name, tensor in root.state_dict().items() if not _is_packed(name, everywhere)}
    return _Parts(packed, stacks, weights, _without_twins(root, others))


def stored_as(root: nn.Module, layout: str, calibration: Calibration | None = None) -> StoredModel:
    """What a folder holds of a packed model in a layout of safetensors."""
    return stored_model(root, *_parts(root), layout, calibration)


def load_checkpoint(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    activations: str | None = None,
    strict: bool = True,
    kv_cache: str | None = None,
) -> nn.Module:
    """Load a packed checkpoint, ours or another tool's, into a model of the same architecture, in place: NVFP4, FP8 by
    rows, by blocks or by matrices, MXFP4 experts (as NVFP4), or several of these.

    Layers that are packed in the checkpoint become packed layers; all other tensors are loaded as they are.
    ``activations`` are ``pack``'s: "fp8" takes the static scales of the checkpoint where it has some. In a checkpoint
    of several formats they are for the layers whose format knows them; the others keep their inputs exact.

    ``kv_cache``: "fp8_static" takes the checkpoint's ``k_scale`` and ``v_scale`` for the caches that ``generate``
    makes, "fp8" scales each token of each head by itself; without it caches are exact.
    """
    root, folder = unwrapped(model), pathlib.Path(folder)
    tensors, where = read_with_files(folder)
    cache = wanted_cache(kv_cache, root, tensors, folder)
    tensors = without_cache_scales(tensors, root.state_dict(), used=kv_cache == "fp8_static")
    rest, filled = place_packed(root, tensors, where, folder, activations)
    missing, unexpected = _load_others(root, rest, folder)
    everywhere = root.named_modules(remove_duplicate=False)
    inside = {name: module for name, module in everywhere if id(module) in filled}
    missing = [name for name in missing if not _is_packed(name, inside) and not _is_tied(root, name, rest)]
    if strict and (missing or unexpected):
        raise ValueError(f"{folder}: tensors missing: {missing or 'none'}; not of this model: {unexpected or 'none'}")
    if cache is not None:
        use_fp8_cache(root, cache)
    if filled:
        let_transformers_save(root)
    return model


def let_transformers_save(root: nn.Module) -> None:
    """Have ``save_pretrained`` write what ``save_checkpoint`` writes, if this is a model of transformers."""
    if hasattr(root, "save_pretrained") and hasattr(root, "base_model_prefix"):
        with contextlib.suppress(ImportError):  # of a release without quantizers of other packages
            from .pretrained import let_it_save

            let_it_save(root)


def place_packed(
    root: nn.Module,
    tensors: dict[str, Tensor],
    where: Mapping[str, pathlib.Path],
    folder: pathlib.Path,
    activations: str | None,
    device: torch.device | None = None,
) -> tuple[dict[str, Tensor], set[int]]:
    """Put the packed weights among a checkpoint's tensors into a model. The result is the other tensors, by the model's
    names, and the ids of the modules that were filled. ``device`` is where weights go, by default where the model's
    are."""
    names = StoredNames(root)
    found = packed_layers(tensors)
    check_whole(found, tensors, where)
    check_activations(found, activations)
    check_experts(names, tensors, found, where)
    stacks, experts = _read_experts(names, tensors, found, device, activations)
    mixtures = read_mxfp4(names, tensors, device)
    layers = {name: stored for name, stored in found.items() if name not in experts}
    sources = names.found_in(layers)
    modules, read = dict(root.named_modules()), read_layers(layers, tensors)
    weights: dict[str, Matrix] = {}
    for name, rows in sources.items():
        weights[name] = rows.of(read, name)
        check_layer(folder, name, modules.get(name), weights[name])
    used = {tensor for name, stored in found.items() for tensor in stored.tensor_names(name)}
    used |= {f"{stack}_{part}" for stack in mixtures for part in MXFP4_PARTS}
    rest = names.load({name: tensor for name, tensor in tensors.items() if name not in used})
    check_others(root, rest, where, folder)
    input_scales = _input_scales(layers, tensors) if activations else {}
    # All was read and checked: from here on the model changes.
    stacks |= mixtures
    for stack, packed in stacks.items():
        replace_stack(names.stacks[stack], stack.rpartition(".")[2], packed)
    for name, rows in sources.items():
        layer, (format, _) = modules[name], layers[rows.layers[0]]
        dtype = layer.dtype if isinstance(layer, PackedLinear) else weight_of(layer).dtype
        place = device or next(iter([*layer.parameters(), *layer.buffers()])).device
        given = [input_scales[one].to(place) for one in rows.layers if one in input_scales]
        scale = torch.stack(given).amax(0) if len(given) > 1 else next(iter(given), None)
        inputs = activations if activations in format.activations else None
        format.linear.convert(layer, weights[name].to(place), dtype, inputs, scale)
    filled = {id(modules[name]) for name in sources} | {id(one) for one in packed_stacks(root, stacks).values()}
    return rest, filled


def _input_scales(found: Mapping[str, Stored], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The static scales of inputs that the checkpoint has, by layer."""
    read = {name: stored.layout.read_input_scale(name, tensors) for name, stored in found.items()}
    return shared_scales({name: scale for name, scale in read.items() if scale is not None})


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
    names: StoredNames,
    tensors: Mapping[str, Tensor],
    found: Mapping[str, Stored],
    device: torch.device | None,
    activations: str | None,
) -> tuple[dict[str, PackedStack], dict[str, str]]:
    """The stacks that the checkpoint has packed, and its layers with the stack that each is of."""
    stacks: dict[str, PackedStack] = {}
    taken: dict[str, str] = {}
    for stack, module in names.stacks.items():
        layers = names.experts(stack)
        if not any(layer in found for layer in layers):
            continue
        before = names.parameter(stack)
        place = device or next(iter([*module.parameters(), *module.buffers()])).device
        read = read_layers({layer: found[layer] for layer in layers if layer in found}, tensors)
        packed = joined(stack, layers, read, before.dtype, tuple(before.shape)).to(place)
        if isinstance(packed, FP8Stack) and activations == "fp8":
            scales = _input_scales({layer: found[layer] for layer in read}, tensors)
            if scales:  # of experts the largest: none saturates
                packed.use_activations("fp8", torch.stack(list(scales.values())).amax().to(place))
        elif isinstance(packed, MXFP8Stack) and activations == "mxfp8":
            packed.use_activations(activations)
        stacks[stack] = packed
        taken |= dict.fromkeys(layers, stack)
    return stacks, taken


def _is_packed(name: str, modules: Mapping[str, nn.Module]) -> bool:
    layer, _, part = name.rpartition(".")
    module = modules.get(layer)
    return isinstance(module, PackedWeight) and part in module.packed


def _without_twins(root: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with one name of those that are tied, as transformers saves them: the one that the others are tied
    to, where the model says so, or the first."""
    tied = getattr(root, "all_tied_weights_keys", {})
    names: dict[Any, str] = {}
    for name, tensor in sorted(tensors.items(), key=lambda one: one[0] in tied):
        names.setdefault((tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()), name)
    kept = set(names.values())
    return {name: tensor for name, tensor in tensors.items() if name in kept or not tensor.numel()}


def _is_tied(root: nn.Module, name: str, given: Mapping[str, Tensor]) -> bool:
    """True if a tensor that the checkpoint lacks is one that it has under another name."""
    tensors = dict(root.state_dict(keep_vars=True))
    return any(tensors[other] is tensors[name] for other in given if other in tensors and other != name)


def _write_shards(folder: pathlib.Path, tensors: dict[str, Tensor], shard_bytes: int) -> list[str]:
    """Write the tensors and return the names of the files."""
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
