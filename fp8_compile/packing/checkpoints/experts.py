"""Experts in checkpoints: not a stack, but a matrix an expert, gate and up apart.

    model:       model.layers.0.mlp.experts.gate_up_proj [E, 2I, K], down_proj [E, K, I]
    checkpoint:  model.layers.0.mlp.experts.3.gate_proj, .up_proj, .down_proj              [I, K], [I, K], [K, I]
                 model.layers.0.block_sparse_moe.experts.3.w1, .w3, .w2                    Mixtral's names for them

Which names a model has is asked of transformers: its conversion of stacks to what is stored is run on markers.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any, Callable, Mapping

import torch
from torch import Tensor, nn

from fp8_compile.kernels.nvfp4.quantize import quantize_nvfp4
from fp8_compile.kernels.nvfp4.weight import NVFP4Weight
from fp8_compile.packing.expert_stacks import STACKS, is_experts
from fp8_compile.packing.packed_experts import FP8Stack, NVFP4Stack, PackedStack

log = logging.getLogger("fp8_compile")
HALVES = {"gate_up_proj": 2}  # rows of gate, then rows of up


@dataclasses.dataclass(frozen=True)
class Part:
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
        convert, self.stored, self.own = _conversions(root) if self.stacks else (None, str, str)
        self.parts: dict[str, Part] = {}
        for name, module in self.stacks.items():
            self.parts |= _parts(name, module, convert)

    def of(self, stack: str) -> dict[str, Part]:
        """The layers of a checkpoint that a stack is stored as; an error where nobody knows them."""
        found = {layer: part for layer, part in self.parts.items() if part.stack == stack}
        if not found:
            raise ValueError(
                f"{stack}: checkpoints of this model don't hold a matrix an expert, the only form of packed experts "
                f"there; exclude {stack!r} from packing, or save model.state_dict()"
            )
        return found

    def parameter(self, stack: str) -> Any:
        """The stack as the model has it, plain or packed; it has a dtype and a shape."""
        module, own = self.stacks[stack], stack.rpartition(".")[2]
        plain = module._parameters.get(own)
        return module.stack(own) if plain is None else plain  # type: ignore[operator]

    def known(self, stack: str) -> bool:
        return any(part.stack == stack for part in self.parts.values())


def _parts(name: str, module: nn.Module, convert: Callable[[dict[str, Tensor]], Any] | None) -> dict[str, Part]:
    """By markers: a stack whose only numbers say which expert and half they are of, sent through the conversion."""
    halves = HALVES.get(name.rpartition(".")[2], 1)
    count = _size(module, name.rpartition(".")[2])
    if module.is_transposed or (halves > 1 and not module.is_concatenated):
        return {}
    if convert is None:
        parent, own = name.rpartition(".")[::2]
        names = ("gate_proj", "up_proj") if halves > 1 else (own,)
        return {
            f"{parent}.{expert}.{one}".strip("."): Part(name, expert, half, halves)
            for expert in range(count)
            for half, one in enumerate(names)
        }
    markers = torch.arange(count * halves).view(count, halves, 1)
    made = convert({name: markers})
    if len(made) != count * halves or not all(key.endswith(".weight") for key in made):
        return {}
    return {
        key.removesuffix(".weight"): Part(name, *divmod(int(marker), halves), halves) for key, marker in made.items()
    }


def _size(module: nn.Module, own: str) -> int:
    packed = module._modules.get(f"{own}_packed")
    return packed.experts if isinstance(packed, PackedStack) else module._parameters[own].shape[0]  # type: ignore[union-attr]


def _conversions(root: nn.Module) -> tuple[Any, Callable[[str], str], Callable[[str], str]]:
    """What transformers does to stacks when it saves them, to other names when it saves, and when it loads."""
    if not hasattr(root, "base_model_prefix"):
        return None, str, str
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming, apply_renamings, revert_weight_conversion

    found = getattr(root, "_weight_conversions", None) or get_model_conversion_mapping(root, add_legacy=False)
    renamings = [one for one in found if isinstance(one, WeightRenaming) and not isinstance(one, PrefixChange)]
    reverse = [one.reverse_transform() for one in renamings[::-1]]
    return (
        lambda tensors: revert_weight_conversion(root, tensors),
        lambda name: apply_renamings(name, reverse),
        lambda name: apply_renamings(name, renamings),
    )


def parts_of(stack: PackedStack, part: Part) -> Any:
    """What a checkpoint holds of a packed stack as one layer: an ``NVFP4Weight``, or codes and scales of FP8."""
    matrix, rows = stack.matrix(part.expert), part.rows(stack.out_features)  # type: ignore[operator]
    if isinstance(matrix, NVFP4Weight):
        codes, block_scales = matrix.codes[rows].contiguous(), matrix.block_scales[rows].contiguous()
        return NVFP4Weight(codes, block_scales, matrix.global_scale, matrix.columns)
    return tuple(one[rows].contiguous() for one in matrix)


def joined(
    stack: str, names: Mapping[str, Part], layers: Mapping[str, Any], dtype: torch.dtype, shape: tuple[int, ...]
) -> PackedStack:
    """The stack [E, N, K] that a checkpoint's layers are, each an ``NVFP4Weight`` or codes and scales of FP8."""
    _check_alike(stack, names, layers, shape)
    by_expert: dict[int, dict[int, Any]] = {}
    for name, part in names.items():
        by_expert.setdefault(part.expert, {})[part.half] = layers[name]
    whole: list[Any] = []
    for expert in sorted(by_expert):
        halves = [by_expert[expert][half] for half in sorted(by_expert[expert])]
        if isinstance(halves[0], NVFP4Weight):
            whole.append(_one_scale(f"{stack}[{expert}]", halves))
        else:
            whole.append(tuple(torch.cat(parts) for parts in zip(*halves)))
    kind = NVFP4Stack if isinstance(whole[0], NVFP4Weight) else FP8Stack
    return kind.of(whole, dtype, transposed=False)


def _check_alike(stack: str, names: Mapping[str, Part], layers: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """All experts are packed, in one format, and of the model's size."""
    for name, part in names.items():
        if name not in layers:
            raise ValueError(f"{stack}: the checkpoint packs some of its experts, but not {name}; expected all or none")
        weight, first = layers[name], layers[next(iter(names))]
        if isinstance(weight, NVFP4Weight) != isinstance(first, NVFP4Weight):
            raise ValueError(f"{stack}: the checkpoint packs some experts in NVFP4 and {name} in FP8, or the other way")
        stored = tuple(weight.shape if isinstance(weight, NVFP4Weight) else weight[0].shape)
        expected = (shape[1] // part.halves, shape[2])
        if stored != expected:
            raise ValueError(
                f"{name}: the checkpoint has a weight of {list(stored)}, the model's is {list(expected)} in {stack}; "
                "load it into the architecture it was saved from"
            )


def _one_scale(name: str, halves: list[NVFP4Weight]) -> NVFP4Weight:
    """Gate and up under each other, as one matrix with one global scale."""
    scale = torch.stack([one.global_scale for one in halves]).amax()
    if any(not torch.equal(one.global_scale, scale) for one in halves):
        log.warning("%s: gate and up given one global scale, their block scales searched anew", name)
        return quantize_nvfp4(torch.cat([one.dequantize() for one in halves]), "sweep", global_scale=scale, name=name)
    codes, block_scales = (torch.cat([getattr(one, part) for one in halves]) for part in ("codes", "block_scales"))
    return NVFP4Weight(codes, block_scales, scale, halves[0].columns)


def split_plain(names: ExpertNames, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Other tensors as a checkpoint names them, stacks that are not packed as a matrix an expert too."""
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in names.stacks and names.known(name):
            for layer, part in names.of(name).items():
                out[f"{layer}.weight"] = tensor[part.expert, part.rows(tensor.shape[1])].contiguous()
        else:
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
        layers = {layer: part for layer, part in names.parts.items() if part.stack == stack}
        if layers and all(f"{layer}.weight" in tensors for layer in layers):
            ordered = sorted(layers, key=lambda layer: (layers[layer].expert, layers[layer].half))
            rows = torch.stack([tensors[f"{layer}.weight"] for layer in ordered])
            out[stack] = rows.view(-1, next(iter(layers.values())).halves * rows.shape[1], rows.shape[2])
    return out
