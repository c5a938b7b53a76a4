"""Packed layers under peft's adapters: LoRA on a packed model, and packing a model that has adapters.

    peft.get_peft_model(packed, LoraConfig(target_modules="all-linear"))     our layers are known to peft
    fp8_compile.pack(peft_model)                                             base layers are packed, adapters are not

peft's extension point for layers that it does not know is a mapping of each LoraConfig. ``register`` has it filled in
where layers are replaced, and has "all-linear" find packed layers. It runs when the second of the two libraries is
imported. An adapter's layer is known here by peft's naming, so that peft is not imported for it.
"""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from typing import Any, Iterable

import torch
from torch import Tensor, nn

from .linear_layers import fused_groups
from .packed_linear import PackedLinear

ADAPTER = "belongs to an adapter, which is trained as it is"


def register() -> None:
    """Make packed layers known to peft; a second call does nothing."""
    from peft.tuners import tuners_utils
    from peft.tuners.lora.model import LoraModel

    create = LoraModel._create_new_module
    if getattr(create, "knows_packed_layers", False):
        return

    def create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        lora_config._register_custom_module({PackedLinear: _lora_class()})
        made: nn.Module = create(lora_config, adapter_name, target, **kwargs)
        return made

    create_new_module.knows_packed_layers = True  # type: ignore[attr-defined]
    LoraModel._create_new_module = staticmethod(create_new_module)  # type: ignore[method-assign]
    include_all = tuners_utils._maybe_include_all_linear_layers

    @functools.wraps(include_all)
    def include_packed(peft_config: Any, model: nn.Module) -> Any:
        asked = peft_config.target_modules
        config: Any = include_all(peft_config, model)
        if isinstance(asked, str) and asked.lower() == "all-linear" and not isinstance(config.target_modules, str):
            config.target_modules = set(config.target_modules) | _packed_names(model)
        return config

    for module in list(sys.modules.values()):  # those that imported it by name
        if getattr(module, "_maybe_include_all_linear_layers", None) is include_all:
            module._maybe_include_all_linear_layers = include_packed  # type: ignore[attr-defined]


def _packed_names(model: nn.Module) -> set[str]:
    """Names of packed layers, the output head's left out as peft leaves it out."""
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear) and module is not head}


@functools.cache
def _lora_class() -> type[nn.Module]:
    from peft.tuners.lora.layer import Linear

    base: Any = Linear

    class PackedLoraLinear(base):
        """peft's LoRA layer on a packed one. Its weight is [N, K], whatever it was before it was packed."""

        def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> None:
            with warnings.catch_warnings():  # peft warns about layers that came through its extension point
                warnings.filterwarnings("ignore", message="Unsupported layer type", category=UserWarning)
                super().__init__(base_layer, adapter_name, config=_plain(config), **kwargs)

        def update_layer(self, *args: Any, config: Any, **kwargs: Any) -> None:
            if isinstance(config.init_lora_weights, str) and config.init_lora_weights not in ("gaussian", "orthogonal"):
                raise ValueError(
                    f"init_lora_weights={config.init_lora_weights!r} changes the base weight, which is packed; "
                    "expected True, False, 'gaussian' or 'orthogonal', or initialize before packing"
                )
            super().update_layer(*args, config=_plain(config), **kwargs)

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            _refuse("merge")

        def unmerge(self) -> None:
            if self.merged:
                _refuse("unmerge")

        def __repr__(self) -> str:
            return super().__repr__().replace("lora.Linear", "lora.PackedLoraLinear")

    return PackedLoraLinear


def _plain(config: Any) -> Any:
    if not config.fan_in_fan_out:
        return config
    config = copy.copy(config)
    config.fan_in_fan_out = False
    return config


def _refuse(what: str) -> None:
    raise ValueError(
        f"{what}: the base weight is packed, and quantizing it again loses a part of the adapter. Expected "
        "fp8_compile.merge_adapters(model), which does that, or an adapter that stays beside the packed weight "
        "(save_pretrained saves it by itself)"
    )


def is_adapted(module: nn.Module) -> bool:
    """True for a layer of peft's around another one."""
    return "base_layer" in module._modules and hasattr(type(module), "adapter_layer_names")


def reasons_against(root: nn.Module) -> dict[str, str]:
    """Why linear layers of a model with adapters are not packed, by name; nothing where there are no adapters."""
    adapted = [name for name, module in root.named_modules() if is_adapted(module)]
    reasons: dict[str, str] = {}
    if not adapted:
        return reasons
    for name, module in root.named_modules():
        outer = max((one for one in adapted if name.startswith(f"{one}.")), key=len, default=None)
        weight = module._parameters.get("weight")
        if outer is not None and not f"{name}.".startswith(f"{outer}.base_layer."):
            reasons[name] = ADAPTER
        elif weight is not None and weight.requires_grad:
            reasons[name] = "its weight requires gradients beside adapters: it is trained as it is"
    return reasons


def adopt(root: nn.Module) -> None:
    """Let peft's LoRA layers know that their base layer is packed now."""
    for module in root.modules():
        if is_adapted(module) and isinstance(module._modules["base_layer"], PackedLinear):
            from peft.tuners.lora.layer import Linear

            if type(module) is Linear:
                module.__class__ = _lora_class()  # type: ignore[assignment]
                module.fan_in_fan_out = False


def merge_adapters(model: nn.Module, adapter_names: list[str] | None = None) -> list[str]:
    """Quantize base weights with their active adapters added, in place, and count the adapters as merged.

    Returns the names of the layers. Rounding to nearest on the packed layer's grid loses what is smaller than half a
    step; ``model.unload()`` takes the adapters away afterwards. Layers that are not packed are merged by peft.
    """
    from peft.tuners.tuners_utils import check_adapters_to_merge

    from .update import update_packed

    wanted: dict[str, list[str]] = {}
    layers = {name: module for name, module in model.named_modules() if is_adapted(module) and hasattr(module, "merge")}
    for name, module in layers.items():
        if isinstance(module._modules["base_layer"], PackedLinear):
            names = [one for one in check_adapters_to_merge(module, adapter_names) or () if one in module.lora_A]
            _check_plain_lora(name, module, names)
            wanted |= {name: names} if names else {}
    for group in [*fused_groups(wanted), *((one,) for one in _alone(wanted))]:
        weights = {f"{name}.weight": _merged_weight(layers[name], wanted[name]) for name in group}
        update_packed(model, weights)
        for name in group:
            layers[name].merged_adapters.extend(wanted[name])
    for module in layers.values():
        if not isinstance(module._modules["base_layer"], PackedLinear):
            module.merge(adapter_names=adapter_names)
    return list(wanted)


def _alone(names: Iterable[str]) -> list[str]:
    grouped = {name for group in fused_groups(names) for name in group}
    return [name for name in names if name not in grouped]


def _check_plain_lora(name: str, module: Any, adapters: list[str]) -> None:
    variants = [one for one in adapters if one in module.lora_variant]
    if variants:
        raise ValueError(
            f"{name}: adapter {variants[0]!r} is a variant of LoRA (DoRA, aLoRA, ...); expected plain LoRA to merge "
            "into packed weights; keep the adapter beside them"
        )


@torch.no_grad()
def _merged_weight(module: Any, adapters: list[str]) -> Tensor:
    """The base weight with adapters added, in the shape that it had before it was packed."""
    base = module._modules["base_layer"]
    weight: Tensor = base.dequantize(torch.float32)
    for one in adapters:
        weight += module.get_delta_weight(one).to(torch.float32)
    return weight.t() if base.transposed else weight
