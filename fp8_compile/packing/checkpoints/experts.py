"""Experts in checkpoints: not a stack, but one matrix per expert, with gate and up apart.

    model:       model.layers.0.mlp.experts.gate_up_proj [E, 2I, K], down_proj [E, K, I]
    checkpoint:  model.layers.0.mlp.experts.3.gate_proj, .up_proj, .down_proj              [I, K], [I, K], [K, I]
                 model.layers.0.block_sparse_moe.experts.3.w1, .w3, .w2                    Mixtral's names for them

``stored_names.py`` finds out which names a model has.
"""

from __future__ import annotations

import dataclasses
from typing import Collection, Mapping

import torch
from torch import Tensor, nn

from fp8_compile.packing.formats import format_of, format_of_matrix
from fp8_compile.packing.linear_layers import parameter_of
from fp8_compile.packing.packed_experts import PackedExperts, PackedStack
from fp8_compile.packing.packed_weight import Matrix

LAYERS_OF_STACK = {"gate_up_proj": 2}  # rows of gate, then rows of up; of other stacks 1


@dataclasses.dataclass(frozen=True)
class ExpertRows:
    """A layer of a checkpoint: the ``half``-th of ``halves`` parts of the rows of one expert's matrix."""

    stack: str
    expert: int
    half: int
    halves: int

    def rows(self, count: int) -> slice:
        return slice(self.half * count // self.halves, (self.half + 1) * count // self.halves)


def marked_stack(stack: str, module: nn.Module) -> Tensor | None:
    """Markers in the place of a stack, numbers that say which expert and half they are of; None for a stack whose
    experts are not matrices [N, K] with gate above up."""
    halves = LAYERS_OF_STACK.get(stack.rpartition(".")[2], 1)
    if module.is_transposed or (halves > 1 and not module.is_concatenated):
        return None
    count = parameter_of_stack(module, stack.rpartition(".")[2]).shape[0]
    return torch.arange(count * halves).view(count, halves, 1)


def parts_of_markers(stack: str, markers: Tensor, made: Mapping[str, Tensor]) -> dict[str, ExpertRows]:
    """The layers that a stack of markers was saved as; none where that is not one matrix per expert and half."""
    if len(made) != markers.numel() or not all(key.endswith(".weight") for key in made):
        return {}
    halves = markers.shape[1]
    return {
        key.removesuffix(".weight"): ExpertRows(stack, *divmod(int(marker), halves), halves)
        for key, marker in made.items()
    }


def plain_parts(stack: str, module: nn.Module) -> dict[str, ExpertRows]:
    """The same for a model that transformers doesn't know."""
    markers = marked_stack(stack, module)
    if markers is None:
        return {}
    parent, own = stack.rpartition(".")[::2]
    names = ("gate_proj", "up_proj") if markers.shape[1] > 1 else (own,)
    return {
        f"{parent}.{expert}.{one}".strip("."): ExpertRows(stack, expert, half, len(names))
        for expert in range(len(markers))
        for half, one in enumerate(names)
    }


def parameter_of_stack(module: nn.Module, own: str) -> nn.Parameter | PackedStack:
    if isinstance(module, PackedExperts) and own in module.stacks:
        return module.stack(own)
    return parameter_of(module, own)


def part_of(stack: PackedStack, part: ExpertRows) -> Matrix:
    """What a checkpoint holds of a packed stack as one layer."""
    return format_of(stack).rows(stack.matrix(part.expert), part.rows(stack.out_features))


def module_of_expert(layer: str) -> str:
    """The module that holds an expert: ``mlp.experts`` of ``mlp.experts.3.gate_proj``."""
    return layer.rpartition(".")[0].rpartition(".")[0]


def joined(
    stack: str,
    names: Mapping[str, ExpertRows],
    layers: Mapping[str, Matrix],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> PackedStack:
    """The stack [E, N, K] that a checkpoint's layers are."""
    _check_alike(stack, names, layers, shape)
    by_expert: dict[int, dict[int, Matrix]] = {}
    for name, part in names.items():
        by_expert.setdefault(part.expert, {})[part.half] = layers[name]
    format = format_of_matrix(next(iter(layers.values())))
    whole = []
    for expert in sorted(by_expert):
        halves = [by_expert[expert][half] for half in sorted(by_expert[expert])]
        whole.append(format.concatenate(halves, f"{stack}[{expert}]"))
    return format.stack.of(whole, dtype, transposed=False)


def _check_alike(
    stack: str, names: Mapping[str, ExpertRows], layers: Mapping[str, Matrix], shape: tuple[int, ...]
) -> None:
    """Raise unless all experts are packed, in one format, and have the model's size."""
    for name, part in names.items():
        if name not in layers:
            raise ValueError(f"{stack}: the checkpoint packs some of its experts, but not {name}; expected all or none")
        weight, first = layers[name], layers[next(iter(names))]
        format, other = format_of_matrix(weight), format_of_matrix(first)
        if format is not other:
            raise ValueError(
                f"{stack}: the checkpoint packs some experts in {other.title} and {name} in {format.title}; expected "
                "one format for all"
            )
        expected = (shape[1] // part.halves, shape[2])
        if weight.shape != expected:
            raise ValueError(
                f"{name}: the checkpoint has a weight of {list(weight.shape)}, the model's is {list(expected)} in "
                f"{stack}; load it into the architecture it was saved from"
            )


def split_stacks(
    parts: Mapping[str, ExpertRows], stacks: Collection[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Tensors with one matrix per expert in the place of a stack, where ``parts`` names them."""
    by_stack = _by_stack(parts)
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layers = by_stack.get(name, {}) if name in stacks else {}
        for layer, part in layers.items():
            out[f"{layer}.weight"] = tensor[part.expert, part.rows(tensor.shape[1])].contiguous()
        if not layers:
            out[name] = tensor
    return out


def join_stacks(
    parts: Mapping[str, ExpertRows], stacks: Collection[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The inverse of ``split_stacks``."""
    by_stack = _by_stack(parts)
    out = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in parts}
    for stack in stacks:
        layers = by_stack.get(stack, {})
        if layers and all(f"{layer}.weight" in tensors for layer in layers):
            ordered = sorted(layers, key=lambda layer: (layers[layer].expert, layers[layer].half))
            rows = torch.stack([tensors[f"{layer}.weight"] for layer in ordered])
            out[stack] = rows.view(-1, next(iter(layers.values())).halves * rows.shape[1], rows.shape[2])
    return out


def _by_stack(parts: Mapping[str, ExpertRows]) -> dict[str, dict[str, ExpertRows]]:
    found: dict[str, dict[str, ExpertRows]] = {}
    for layer, part in parts.items():
        found.setdefault(part.stack, {})[layer] = part
    return found
