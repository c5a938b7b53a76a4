"""Experts in checkpoints: not a stack, but one matrix per expert, with gate and up apart.

    model:       model.layers.0.mlp.experts.gate_up_proj [E, 2I, K], down_proj [E, K, I]
    checkpoint:  model.layers.0.mlp.experts.3.gate_proj, .up_proj, .down_proj              [I, K], [I, K], [K, I]
                 model.layers.0.block_sparse_moe.experts.3.w1, .w3, .w2                    Mixtral's names for them

transformers knows which names a model has: its conversion of stacks to what is stored is run on markers.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Callable, Mapping

import torch
from torch import Tensor, nn

from fp8_compile.packing.expert_stacks import STACKS, is_experts
from fp8_compile.packing.formats import format_of, format_of_matrix
from fp8_compile.packing.linear_layers import parameter_of
from fp8_compile.packing.packed_experts import PackedExperts, PackedStack
from fp8_compile.packing.packed_weight import Matrix
from fp8_compile.torch_internals import transformers

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


class ExpertNames:
    """Names in a checkpoint of a model's experts, and of what else transformers renames with them."""

    def __init__(self, root: nn.Module) -> None:
        self.stacks = {
            f"{name}.{own}".strip("."): module
            for name, module in root.named_modules()
            if is_experts(module)
            for own in STACKS
            if module._parameters.get(own) is not None or f"{own}_packed" in module._modules
        }
        conversions = transformers.conversions(root) if self.stacks else None
        self.stored = conversions.stored if conversions else str
        self.own = conversions.own if conversions else str
        self.parts: dict[str, ExpertRows] = {}
        for name, module in self.stacks.items():
            self.parts |= _parts(name, module, conversions.split if conversions else None)

    def of(self, stack: str) -> dict[str, ExpertRows]:
        """The layers of a checkpoint that a stack is stored as; an error where they are not known."""
        found = self.layers(stack)
        if not found:
            raise ValueError(
                f"{stack}: checkpoints of this model don't hold a matrix an expert, the only form of packed experts "
                f"there; exclude {stack!r} from packing, or save model.state_dict()"
            )
        return found

    def layers(self, stack: str) -> dict[str, ExpertRows]:
        """The same, and nothing where they are not known."""
        return {layer: part for layer, part in self.parts.items() if part.stack == stack}

    def parameter(self, stack: str) -> nn.Parameter | PackedStack:
        """The stack as the model has it, plain or packed; it has a dtype and a shape."""
        return _parameter(self.stacks[stack], stack.rpartition(".")[2])


def _parts(
    name: str, module: nn.Module, split: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None
) -> dict[str, ExpertRows]:
    """Split a stack of markers, numbers that say which expert and half they are of, as the stack would be saved."""
    halves = LAYERS_OF_STACK.get(name.rpartition(".")[2], 1)
    count = _parameter(module, name.rpartition(".")[2]).shape[0]
    if module.is_transposed or (halves > 1 and not module.is_concatenated):
        return {}
    if split is None:
        parent, own = name.rpartition(".")[::2]
        names = ("gate_proj", "up_proj") if halves > 1 else (own,)
        return {
            f"{parent}.{expert}.{one}".strip("."): ExpertRows(name, expert, half, halves)
            for expert in range(count)
            for half, one in enumerate(names)
        }
    markers = torch.arange(count * halves).view(count, halves, 1)
    made = split({name: markers})
    if len(made) != count * halves or not all(key.endswith(".weight") for key in made):
        return {}
    return {
        key.removesuffix(".weight"): ExpertRows(name, *divmod(int(marker), halves), halves)
        for key, marker in made.items()
    }


def _parameter(module: nn.Module, own: str) -> nn.Parameter | PackedStack:
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


def split_plain(names: ExpertNames, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other tensors as a checkpoint names them; a stack that is not packed becomes one matrix per expert, too."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layers = names.layers(name) if name in names.stacks else {}
        for layer, part in layers.items():
            out[f"{layer}.weight"] = tensor[part.expert, part.rows(tensor.shape[1])].contiguous()
        if not layers:
            out[names.stored(name)] = tensor
    return out


def join_plain(names: ExpertNames, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of ``split_plain``."""
    out = {
        names.own(name): tensor
        for name, tensor in tensors.items()
        if re.sub(r"\.weight$", "", name) not in names.parts
    }
    for stack in names.stacks:
        layers = names.layers(stack)
        if layers and all(f"{layer}.weight" in tensors for layer in layers):
            ordered = sorted(layers, key=lambda layer: (layers[layer].expert, layers[layer].half))
            rows = torch.stack([tensors[f"{layer}.weight"] for layer in ordered])
            out[stack] = rows.view(-1, next(iter(layers.values())).halves * rows.shape[1], rows.shape[2])
    return out
