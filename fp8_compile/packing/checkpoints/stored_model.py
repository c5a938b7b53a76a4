"""A packed model as a checkpoint has it: tensors by the names that servers know, and what the configuration says."""

from __future__ import annotations

import logging
from typing import Any, Mapping, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.packing.calibration import Calibration
from fp8_compile.packing.formats import FORMATS, NVFP4, Format, by_one_scale, format_of
from fp8_compile.packing.input_scales import global_scales
from fp8_compile.packing.linear_layers import fused_groups, linear_layers
from fp8_compile.packing.packed_experts import PackedStack
from fp8_compile.packing.packed_linear import PackedLinear
from fp8_compile.packing.packed_nvfp4_inputs import NVFP4InputsLinear
from fp8_compile.packing.packed_weight import Matrix

from .cache_scales import written_scales
from .experts import module_of_expert, part_of
from .quantization_config import Group, quantization_config
from .stored_names import StoredNames

log = logging.getLogger("fp8_compile")
# Inputs of experts as checkpoints have them, by format: servers read FP8 experts only with inputs in FP8, one scale per
# token. Here they stay exact.
STACK_INPUTS = {"fp8": False}


def unpacked_matrices(root: nn.Module, names: StoredNames, tensors: Mapping[str, Tensor]) -> list[str]:
    """The linear layers that are not packed, by the names in the checkpoint, and every other matrix that is stored:
    routers are linear layers of servers' models, too. Embeddings are not."""
    unpacked = {name for name in linear_layers(root) if name in names.sources}
    layers = [name for name, rows in names.layers.items() if unpacked.issuperset(rows.layers)]
    modules = (f"{name}.weight" for name, one in root.named_modules() if isinstance(one, nn.Embedding))
    embeddings = {names.stored(name).removesuffix(".weight") for name in modules}
    matrices = (name for name, one in tensors.items() if name.endswith(".weight") and one.dim() == 2)
    found = dict.fromkeys([*layers, *(name.removesuffix(".weight") for name in matrices)])
    return [name for name in found if name not in embeddings]


class StoredModel(NamedTuple):
    """What a folder holds of a model, beside the model's own configuration."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]  # "quantization_config"
    files: dict[str, dict[str, Any]]  # other JSON files, by name


def stored_model(
    root: nn.Module,
    packed: Mapping[str, PackedLinear],
    stacks: Mapping[str, PackedStack],
    weights: Mapping[str, Matrix],
    others: Mapping[str, Tensor],
    layout: str,
    calibration: Calibration | None,
) -> StoredModel:
    """``weights`` are those of ``packed``, after ``fuse_weights``; ``others`` all tensors that are not packed."""
    names = StoredNames(root)
    homes = names.homes(packed)
    tensors = names.store(others)
    ignore = unpacked_matrices(root, names, tensors)
    scales = _nvfp4_inputs(packed, stacks, calibration)
    groups: dict[tuple[str, bool | None], Group] = {}
    for stored, rows in homes.items():
        layer = packed[rows.layers[0]]
        format = format_of(layer)
        written = format.layout(layout, stored)
        own = [scales.get(name, packed[name].static_scale) for name in rows.layers]
        given = [scale for scale in own if scale is not None]  # of layers in one matrix the largest: none saturates
        scale = torch.stack(given).amax(0) if len(given) > 1 else next(iter(given), None)
        tensors |= written.tensors(stored, rows.of(weights, stored), scale)
        inputs = True if rows.layers[0] in scales else layer.static_inputs
        group = groups.setdefault((format.name, inputs), Group(written, inputs))
        group.layers.append(stored)
        group.renamed += [name for name in rows.layers if name != stored]
    for stack, module in stacks.items():
        format = format_of(module)
        check_stack(stack, format, layout)
        written, static = format.layout(layout, stack), module.static_inputs
        inputs = True if stack in scales else STACK_INPUTS.get(format.name) if static is None else static
        parts = names.of(stack)
        scale = scales.get(stack, module._buffers.get("input_scale"))
        for name, part in parts.items():
            tensors |= written.tensors(name, part_of(module, part), scale)
        group = groups.setdefault((format.name, inputs), Group(written, inputs))
        group.experts = list(dict.fromkeys([*group.experts, *map(module_of_expert, parts)]))
    unpacked = dict.fromkeys(module_of_expert(name) for name, part in names.parts.items() if part.stack not in stacks)
    cache = written_scales(root, layout, names.stored)
    renamed = [name for name in linear_layers(root) if name not in ignore]
    described = quantization_config(list(groups.values()), ignore, list(unpacked), cache.strategy, renamed)
    return StoredModel(tensors | cache.tensors, *described)


def _nvfp4_inputs(
    packed: Mapping[str, PackedLinear], stacks: Mapping[str, PackedStack], calibration: Calibration | None
) -> dict[str, Tensor]:
    """Global scales of the inputs of NVFP4 layers and stacks; nothing without a calibration."""
    if calibration is None:
        return {}
    layers = [name for name, layer in packed.items() if format_of(layer) is NVFP4]
    mixtures = [name for name, stack in stacks.items() if format_of(stack) is NVFP4]
    if not layers and not mixtures:
        raise ValueError(
            "calibration: save_checkpoint takes the scales of NVFP4 inputs from it, and the model has no NVFP4 layer; "
            "leave it out (pack gives FP8 inputs their scales)"
        )
    return global_scales(layers, mixtures, calibration)


def fuse_weights(packed: Mapping[str, PackedLinear], weights: dict[str, Matrix]) -> None:
    """Let layers that servers fuse share what they must, and refuse those that are stored in several ways."""
    for group in fused_groups(packed):
        kinds = {(format_of(packed[name]).title, packed[name].inputs or "exact inputs"): name for name in group}
        if len(kinds) > 1:
            named = "; ".join(f"{name}: {', '.join(kind)}" for kind, name in kinds.items())
            raise ValueError(f"servers make one layer of {named}; expected the same for all, pack them alike")
    trained = {name: layer for name, layer in packed.items() if isinstance(layer, NVFP4InputsLinear)}
    apart = []
    for group in fused_groups(trained):
        same = by_one_scale([cast(NVFP4Weight, weights[name]) for name in group])
        if same is None:
            apart.append(group)
        else:
            weights.update(zip(group, same))
    if apart:
        log.warning(
            "%s and %d other groups keep a global scale for each layer, as training has it; servers that make one "
            "layer of a group (vLLM) take the largest for all, and compute something else: for them, pack without "
            "scales='training'",
            ", ".join(apart[0]),
            len(apart) - 1,
        )
    for format in FORMATS.values():
        own = {name: weights[name] for name, layer in packed.items() if format_of(layer) is format}
        own = {name: weight for name, weight in own.items() if name not in trained}
        format.fuse(own)
        weights |= own


def check_stack(stack: str, format: Format[Any], layout: str) -> None:
    if (format.name, layout) == ("fp8", "modelopt"):
        raise ValueError(
            f"{stack}: layout='modelopt' holds experts in FP8 only where each has one scale for all rows; use "
            "layout='compressed-tensors', or exclude the experts"
        )
