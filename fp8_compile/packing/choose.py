"""Which weights of a model are packed, and why the others are not."""

from __future__ import annotations

from typing import Mapping, Sequence

from torch import nn

from fp8_compile.selection import Selection

from .adapters import reasons_against
from .expert_stacks import ExpertStack, expert_stacks
from .linear_layers import is_linear, linear_layers, reason_against_packing, weight_of
from .pack_report import PackRow
from .packed_experts import PackedStack
from .packed_linear import PackedLinear
from .unpacked_weights import unpacked_weights

Owners = Mapping[int, Sequence[tuple[str, nn.Module]]]  # id of a parameter -> the modules that have it


def choose_weights(
    root: nn.Module, include: Sequence[str], exclude: Sequence[str]
) -> tuple[dict[str, nn.Module], dict[str, ExpertStack], list[PackRow]]:
    """The layers and the stacks of experts to pack, and a row with the reason for each other weight."""
    selection = Selection(_patterns("include", include), _patterns("exclude", exclude))
    selection.check(
        [name for name, _ in [*root.named_modules(), *root.named_parameters(remove_duplicate=False)] if name]
    )
    owners, adapters = _owners(root), reasons_against(root)
    chosen, stacks, skipped = {}, {}, []
    for name, layer in linear_layers(root).items():
        reason = adapters.get(name) or selection.reason_against(name, (f"{name}.weight",))
        reason = reason or reason_against_packing(layer)
        if reason is None:
            others = [other for other, module in owners[id(layer.weight)] if type(module) is not type(layer)]
            reason = f"its weight is tied to {others[0]}" if others else None
        if reason is None:
            chosen[name] = layer
        else:
            skipped.append(PackRow(name, _shape(layer), reason=reason))
    for name, stack in expert_stacks(root).items():
        reason = selection.reason_against(name.rpartition(".")[0], (name,)) or stack.reason_against_packing()
        if reason is None:
            stacks[name] = stack
        else:
            skipped.append(PackRow(name, tuple(stack.matrices.shape), reason=reason))
    return chosen, stacks, [*skipped, *_packed_already(root), *_others(root, owners)]


def _owners(root: nn.Module) -> Owners:
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in root.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, module))
    return owners


def _packed_already(root: nn.Module) -> list[PackRow]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, PackedLinear):
            shapes[name] = module.out_features, module.in_features
        elif isinstance(module, PackedStack):
            shapes[name.removesuffix("_packed")] = module.shape
    return [PackRow(name, shape, reason="packed already") for name, shape in shapes.items()]


def _others(root: nn.Module, owners: Owners) -> list[PackRow]:
    """Rows of the weights that something other than a linear layer or experts multiplies by."""
    known = {key for key, places in owners.items() if any(is_linear(module) for _, module in places)}
    known |= {id(stack.parameter) for stack in expert_stacks(root).values()}
    return [PackRow(name, shape, reason=reason) for name, (shape, reason) in unpacked_weights(root, known).items()]


def _patterns(field: str, patterns: Sequence[str]) -> tuple[str, ...]:
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(f"{field} expects glob patterns on module names such as ('lm_head',), got {patterns!r}")
    return patterns


def _shape(layer: nn.Module) -> tuple[int, ...]:
    weight = layer._parameters.get("weight")
    return () if weight is None else tuple(weight_of(layer).shape)
