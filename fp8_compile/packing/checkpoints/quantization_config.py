"""What ``config.json`` says about packed weights: which layers are stored how, and which are not packed.

    compressed-tensors   "config_groups": one group for each way of storing, and "ignore"
    modelopt             "quant_algo", or MIXED_PRECISION and "quantized_layers" where there are several; the same again
                         in hf_quant_config.json, by which servers know these checkpoints

A single group names its layers by their class, "Linear". Several groups name layers one by one, because a server asks
for the class of a fused layer (qkv_proj) before it asks for the names of its parts. Experts are named by a pattern.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Sequence

from .layouts import Layout

PRODUCER = {"producer": {"name": "fp8_compile"}}


@dataclasses.dataclass
class Group:
    """Layers of a checkpoint that are stored in the same way."""

    layout: Layout[Any]
    static_inputs: bool | None
    layers: list[str] = dataclasses.field(default_factory=list)
    renamed: list[str] = dataclasses.field(default_factory=list)  # layers as transformers has them in memory
    experts: list[str] = dataclasses.field(default_factory=list)  # modules that hold one matrix per expert and role

    @property
    def scheme(self) -> dict[str, Any]:
        return self.layout.scheme(self.static_inputs)


def quantization_config(
    groups: Sequence[Group],
    ignore: Sequence[str],
    ignored_experts: Sequence[str] = (),
    kv_cache: str | None = None,
    ignored_renamed: Sequence[str] = (),
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The object for ``config.json``, and other JSON files by name. ``ignored_experts`` are modules whose experts are
    not packed; ``kv_cache`` says how the static scales of an FP8 cache are stored, None where there are none.
    ``ignored_renamed`` are layers of ``ignore`` as transformers has them in memory, where that is another name."""
    if groups[0].layout.name == "modelopt":
        return _modelopt(groups, [*ignore, *ignored_experts], kv_cache)
    patterns = [*map(every_expert, ignored_experts), *map(in_memory, ignored_renamed)]
    return _compressed_tensors(groups, [*ignore, *patterns], kv_cache), {}


def every_expert(module: str) -> str:
    """A target of compressed-tensors for all matrices of a module's experts, whatever a model calls them: servers ask
    for gate_proj also where the checkpoint has w1."""
    return rf"re:{re.escape(module)}\.\d+\.\w+$"


def in_memory(layer: str) -> str:
    """A target for a layer as transformers has it: it looks for the names that it gives a model in memory, servers for
    those in the checkpoint."""
    return rf"re:{re.escape(layer)}$"


def _compressed_tensors(groups: Sequence[Group], ignore: list[str], kv_cache: str | None) -> dict[str, Any]:
    described = {}
    for number, group in enumerate(groups):
        named = [*group.layers, *map(every_expert, group.experts), *map(in_memory, group.renamed)]
        described[f"group_{number}"] = {"targets": ["Linear"] if len(groups) == 1 else named, **group.scheme}
    stored = {group.scheme["format"] for group in groups}
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": kv_cache, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": stored.pop() if len(stored) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": described,
        "ignore": ignore,
        "kv_cache_scheme": cache if kv_cache else None,
    }


def _modelopt(
    groups: Sequence[Group], ignore: list[str], kv_cache: str | None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    said: dict[str, Any] = groups[0].scheme
    if len({group.scheme["quant_algo"] for group in groups}) > 1:
        layers = {name: group.scheme for group in groups for name in [*group.layers, *group.experts]}
        said = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    cache = {"num_bits": 8, "type": "float", "dynamic": False} if kv_cache else None
    config = {"quant_method": "modelopt", **said, "kv_cache_scheme": cache, "ignore": ignore, **PRODUCER}
    quantization = {**said, "kv_cache_quant_algo": "FP8" if kv_cache else None, "exclude_modules": ignore}
    return config, {"hf_quant_config.json": {**PRODUCER, "quantization": quantization}}
