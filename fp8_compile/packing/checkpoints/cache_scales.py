"""Static scales of an FP8 key-value cache in checkpoints.

    compressed-tensors   X.k_scale, X.v_scale of the attention module X: [1], or [heads, 1, 1] where heads differ;
                         "kv_cache_scheme" in the configuration, of strategy "tensor" or "attn_head"
    modelopt             X.k_proj.k_scale, X.v_proj.v_scale, one number each, and "kv_cache_quant_algo": "FP8"

A scale multiplies codes, as ours do. A cache that scales each token by itself has nothing that is stored.
"""

from __future__ import annotations

import logging
import pathlib
from typing import Callable, Collection, Mapping, NamedTuple, Sequence

import torch
from torch import Tensor, nn

from fp8_compile.packing.use_fp8_cache import SCALES, Scales, check_kind

from .stored_names import StoredNames

log = logging.getLogger("fp8_compile")
# Beside k_proj and v_proj, or in the attention module. We have no use for those of queries.
OF_CACHE = ("k_scale", "v_scale", "q_scale")


class CacheScales(NamedTuple):
    """The scales of a model as a layout stores them."""

    tensors: dict[str, Tensor]
    strategy: str | None  # in compressed-tensors' words; None for a model without static scales


def written_scales(root: nn.Module, layout: str, stored: Callable[[str], str]) -> CacheScales:
    """The static scales that a model was packed, or loaded, with. ``stored`` gives the name that a tensor is saved
    under. In modelopt's layout a layer has one number for all heads, the largest."""
    scales: Scales = getattr(root, SCALES, None) or {}
    if not scales:
        return CacheScales({}, None)
    apart = any(bool((one != one[0]).any()) for pair in scales.values() for one in pair)
    if apart and layout == "modelopt":
        log.warning(
            "layout='modelopt' has one scale for the keys, and one for the values, of all heads of a layer: the "
            "largest is written. layout='compressed-tensors' keeps a scale for each head"
        )
    per_head = apart and layout != "modelopt"
    tensors = {}
    for index, pair in scales.items():
        attention = _attention(root, index)
        for side, scale in zip("kv", pair):
            place = f"{attention}.{side}_proj" if layout == "modelopt" else attention
            largest = scale.max().reshape(() if layout == "modelopt" else (1,))
            tensors[stored(f"{place}.{side}_scale")] = scale.reshape(-1, 1, 1).clone() if per_head else largest.clone()
    return CacheScales(tensors, "attn_head" if per_head else "tensor")


def _attention(root: nn.Module, index: int) -> str:
    """The name of the module that stores keys and values in a layer of the cache."""
    found = [name for name, one in root.named_modules() if getattr(one, "layer_idx", None) == index]
    inner = [name for name in found if not any(other.startswith(f"{name}.") for other in found)]
    if not inner:
        raise ValueError(
            f"layer {index} of the key-value cache has static scales, and no module of the model says by layer_idx that"
            " it stores there; pack with kv_cache='fp8', which needs no scales in the checkpoint"
        )
    return inner[0]  # a decoder's own attention comes before the one that looks at an encoder


def read_scales(model: nn.Module, tensors: Mapping[str, Tensor], own: Callable[[str], str] = str) -> Scales:
    """Static scales of a checkpoint: ``k_scale`` and ``v_scale`` of an attention module or of its projections, one
    number or one for each head; an empty dict where it has none. ``own`` gives the model's name of a stored module."""
    found: dict[int, dict[str, Tensor]] = {}
    config = getattr(model, "config", None)
    groups = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part not in ("k_scale", "v_scale"):
            continue
        layer = _layer_index(model, own(module))
        if layer is None:
            continue
        scale = tensor.to(torch.float32).flatten()
        if not (scale.isfinite() & (scale > 0)).all() or len(scale) not in (1, groups):
            raise ValueError(
                f"{name}: expected a positive number, or one for each of {groups} heads, got {scale.tolist()[:8]}"
            )
        found.setdefault(layer, {})[part] = scale.expand(groups or len(scale)).clone()
    return {layer: (one["k_scale"], one["v_scale"]) for layer, one in found.items() if len(one) == 2}


def _layer_index(model: nn.Module, name: str) -> int | None:
    """The number of the attention module that a name leads to or into."""
    while name:
        try:
            index = getattr(model.get_submodule(name), "layer_idx", None)
        except AttributeError:
            index = None
        if isinstance(index, int):
            return index
        name = name.rpartition(".")[0]
    return None


def wanted_cache(
    kv_cache: str | None, root: nn.Module, tensors: Mapping[str, Tensor], folder: pathlib.Path
) -> Scales | None:
    """The static scales that a checkpoint's cache is to have, none for scales of each token; None for exact caches."""
    check_kind(kv_cache, root)
    if kv_cache != "fp8_static":
        return None if kv_cache is None else {}
    found = read_scales(root, tensors, StoredNames(root).renamed)
    if not found:
        raise ValueError(
            f"{folder}: kv_cache='fp8_static' takes k_scale and v_scale from the checkpoint, and it has none; expected "
            "kv_cache='fp8', which scales each token by itself"
        )
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
