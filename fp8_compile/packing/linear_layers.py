"""The layers of a model that multiply by a weight matrix: ``nn.Linear``, Conv1D as transformers writes GPT-2, and its
FalconLinear.

y = x @ weight_of(layer).T + bias         weight_of: [N, K]
"""

from __future__ import annotations

import re
from typing import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from fp8_compile.torch_internals.modules import unwrap

# Layers that servers fuse into one: siblings, by the last part of their names. They share their input too.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),  # DeepSeek's latent attention
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("wq", "wk", "wv"),
    ("to_q", "to_k", "to_v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
ON_META = "its weight is on the meta device; load it first"


def unwrapped(model: nn.Module) -> nn.Module:
    """The plain module inside a compiled one."""
    module = unwrap(model)
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, plain or compiled, got {type(model).__name__}")
    return module


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer by its dotted name; one that is in two places has the first of its names."""
    return {name: module for name, module in model.named_modules() if is_linear(module)}


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """True for transformers' Conv1D, a linear layer whose weight is [K, N]; transformers is not imported for it."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def is_falcon_linear(module: nn.Module) -> bool:
    """True for transformers' FalconLinear: ``input @ weight.T + bias``, rounded before the bias is added."""
    kind = type(module)
    return kind.__name__ == "FalconLinear" and kind.__module__ == "transformers.models.falcon.modeling_falcon"


def parameter_of(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter of the module's own; an error where it has none of that name."""
    parameter = module._parameters[name]
    assert parameter is not None, name
    return parameter


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of a linear layer as [N, K]."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.t() if is_conv1d(layer) else weight


def reason_against_packing(layer: nn.Module) -> str | None:
    """Why a linear layer can't be another class, or None."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight without calling it"
    if parametrize.is_parametrized(layer):
        return "its weight is parametrized; torch.nn.utils.parametrize.remove_parametrizations first"
    if "weight" not in layer._parameters:
        return "its weight is not a parameter of its own"
    own = isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward
    if own and not is_falcon_linear(layer):
        return f"{type(layer).__name__} computes more than a linear layer"
    weight = parameter_of(layer, "weight")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {str(weight.dtype).removeprefix('torch.')}"
    if weight.is_meta:
        return ON_META
    return None


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Groups of siblings that servers make one layer of, q/k/v and gate/up; each name is in one group at most."""
    left = dict.fromkeys(names)
    groups = []
    for name in list(left):
        inner = ".base_layer" if name.endswith(".base_layer") else ""  # under peft's adapters
        parent, _, own = name.removesuffix(inner).rpartition(".")
        for family in FUSED:
            if own in family:
                members = [f"{parent}.{one}{inner}".strip(".") for one in family]
                found = tuple(one for one in members if one in left)
                if len(found) > 1 and found[0] == name:
                    groups.append(found)
    return groups


def natural_key(name: str) -> list[tuple[int, str | int]]:
    """A key by which ``layers.10`` is sorted after ``layers.9``."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"[.]", name)]
