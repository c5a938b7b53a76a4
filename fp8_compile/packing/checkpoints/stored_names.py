"""By which names a checkpoint holds a model's tensors: those under which the model was published.

    model                                              checkpoint
    model.language_model.layers.0.mlp.up_proj          language_model.model.layers.0.mlp.up_proj        LLaVA, Gemma 3
    layers.0.attention.q_proj, k_proj, v_proj          layers.0.attn.qkv                                one matrix
    model.layers.0.mlp.experts.gate_up_proj [E, ...]   model.layers.0.mlp.experts.3.gate_proj, ...      experts.py

transformers knows them: its conversion of a model to what is saved is run on markers, numbers that say which row of
which weight they are of. So a packed weight, whose rows are independent, is stored as the plain one would be.
"""

from __future__ import annotations

import dataclasses
from typing import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from fp8_compile.packing.expert_stacks import STACKS, is_experts
from fp8_compile.packing.formats import format_of_matrix
from fp8_compile.packing.linear_layers import is_linear, weight_of
from fp8_compile.packing.packed_experts import PackedStack
from fp8_compile.packing.packed_linear import PackedLinear
from fp8_compile.packing.packed_weight import Matrix, PackedWeight
from fp8_compile.torch_internals import transformers

from .experts import (
    ExpertRows,
    join_stacks,
    marked_stack,
    parameter_of_stack,
    parts_of_markers,
    plain_parts,
    split_stacks,
)


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """What a layer of a checkpoint is: rows of the ``layers`` of the model, which are put one below the other; or what
    a layer of the model is, of the checkpoint's."""

    layers: tuple[str, ...]
    rows: Tensor | None = None  # None: all, in their order

    def of(self, matrices: Mapping[str, Matrix], name: str) -> Matrix:
        """The matrix of it in a packed format."""
        given = [matrices[layer] for layer in self.layers]
        if len(given) == 1 and self.rows is None:
            return given[0]
        format = format_of_matrix(given[0])
        for layer, one in zip(self.layers, given):
            if format_of_matrix(one) is not format:
                raise ValueError(
                    f"{name}: a matrix of {self.layers[0]} in {format.title} and of {layer} in "
                    f"{format_of_matrix(one).title}; expected one format for both, pack them alike"
                )
        whole = given[0] if len(given) == 1 else format.concatenate(given, name)
        if self.rows is None:
            return whole
        first, last = int(self.rows[0]), int(self.rows[-1])
        run = torch.equal(self.rows, torch.arange(first, last + 1))
        try:
            return format.rows(whole, slice(first, last + 1) if run else self.rows)
        except ValueError as error:  # of formats whose rows are not independent
            raise ValueError(
                f"{name}: checkpoints and models have its rows in different places, and {format.weights} can't be "
                "taken apart there; exclude it from packing, or pack it with format='fp8'"
            ) from error


class StoredNames:
    """The names of a model's tensors in a checkpoint, and the way to them and back: the checkpoint that the model was
    loaded from, or the one that transformers knows for it if there is none, or with ``of_its_checkpoint=False``."""

    def __init__(self, root: nn.Module, of_its_checkpoint: bool = True) -> None:
        modules = dict(root.named_modules())
        self.stacks = {
            f"{name}.{own}".strip("."): module
            for name, module in modules.items()
            if is_experts(module)
            for own in STACKS
            if module._parameters.get(own) is not None or f"{own}_packed" in module._modules
        }
        linear = {name: one for name, one in modules.items() if isinstance(one, PackedLinear) or is_linear(one)}
        self.parts: dict[str, ExpertRows] = {}  # layers of the checkpoint that are rows of an expert
        self.layers = {name: LayerRows((name,)) for name in linear}  # other layers of the checkpoint
        self.sources = dict(self.layers)  # the inverse: what the model's layers are of the checkpoint's
        everywhere = root.named_modules(remove_duplicate=False)
        packed = {f"{name}.{own}" for name, one in everywhere if isinstance(one, PackedWeight) for own in one.packed}
        tensors = {name: one for name, one in root.state_dict().items() if isinstance(one, Tensor)}
        self._plain = {name: one for name, one in tensors.items() if name not in packed}
        self._names = {*self._plain, *(f"{name}.weight" for name in linear), *self.stacks}
        self._conversions = transformers.conversions(root, of_its_checkpoint)
        if self._conversions is None:
            for stack, module in self.stacks.items():
                self.parts |= plain_parts(stack, module)
            return
        self._follow_markers(linear)
        if not self.parts and any(isinstance(self.parameter(stack), PackedStack) for stack in self.stacks):
            # It was loaded from a checkpoint of whole stacks, which can't hold packed ones.
            self._conversions = transformers.conversions(root, of_its_checkpoint=False)
            self._follow_markers(linear)

    def _follow_markers(self, linear: Mapping[str, nn.Module]) -> None:
        """Find out where the rows of linear layers and of experts go when a model is saved."""
        assert self._conversions is not None
        for stack, module in self.stacks.items():
            marked = marked_stack(stack, module)
            if marked is not None:
                self.parts |= parts_of_markers(stack, marked, self._conversions.store({stack: marked}))
        counts = torch.tensor([_rows(layer) for layer in linear.values()], dtype=torch.long)
        owners, names = torch.arange(len(counts)).repeat_interleave(counts), [*linear]
        rows = dict(zip(names, torch.arange(len(owners)).split(counts.tolist())))
        # Names may depend on what else is saved.
        others = {name: one.to("meta") for name, one in self._plain.items() if name not in self.stacks}
        markers = {f"{name}.weight": one[:, None] for name, one in rows.items()}
        stored = {
            name.removesuffix(".weight"): one[:, 0]
            for name, one in self._conversions.store(others | markers).items()
            if name.endswith(".weight") and not one.is_meta and one.dim() == 2 and one.shape[1] == 1
        }
        self.layers, homes = {}, dict[str, list[str]]()
        for name, found in stored.items():
            layers = [names[index] for index in owners[found].unique_consecutive().tolist()]
            self.layers[name] = _chosen(dict.fromkeys(layers), rows, found)
            for layer in self.layers[name].layers:
                homes.setdefault(layer, []).append(name)
        self.sources = {layer: _chosen(homes[layer], stored, rows[layer]) for layer in names if layer in homes}

    def of(self, stack: str) -> dict[str, ExpertRows]:
        """The layers of a checkpoint that a stack is stored as; an error where they are not known."""
        found = self.experts(stack)
        if not found:
            raise ValueError(
                f"{stack}: checkpoints of this model don't hold a matrix an expert, the only form of packed experts "
                f"there; exclude {stack!r} from packing, or save model.state_dict()"
            )
        return found

    def experts(self, stack: str) -> dict[str, ExpertRows]:
        """The same, and nothing where they are not known."""
        return {layer: part for layer, part in self.parts.items() if part.stack == stack}

    def parameter(self, stack: str) -> nn.Parameter | PackedStack:
        """The stack as the model has it, plain or packed; it has a dtype and a shape."""
        return parameter_of_stack(self.stacks[stack], stack.rpartition(".")[2])

    def homes(self, layers: Iterable[str]) -> dict[str, LayerRows]:
        """The layers of a checkpoint that some linear layers are stored as; an error where one of them is stored
        together with a layer that is not among them."""
        asked = dict.fromkeys(layers)
        found: dict[str, LayerRows] = {}
        for layer in asked:
            if layer not in self.sources:
                raise ValueError(
                    f"{layer}: checkpoints of this model don't hold its weight row by row, the only form of packed "
                    f"weights there; exclude {layer!r} from packing, or save model.state_dict()"
                )
            for home in self.sources[layer].layers:
                found[home] = self.layers[home]
                for other in found[home].layers:
                    if other not in asked:
                        raise ValueError(
                            f"{home}: checkpoints of this model have one matrix for {layer}, which is packed, and "
                            f"{other}, which is not; pack both alike, or exclude both"
                        )
        return found

    def found_in(self, packed: Collection[str]) -> dict[str, LayerRows]:
        """The linear layers of the model that are among a checkpoint's ``packed`` layers, and what they are of them."""
        found: dict[str, LayerRows] = {}
        for name in packed:
            if name not in self.layers:  # published by another name than the one that transformers saves
                found[self.own(f"{name}.weight").removesuffix(".weight")] = LayerRows((name,))
                continue
            for layer in self.layers[name].layers:
                found[layer] = self.sources[layer]
                for other in found[layer].layers:
                    if other not in packed:
                        raise ValueError(
                            f"{layer}: the checkpoint packs {name}, but not {other}, which has rows of it, too; "
                            "expected both or none"
                        )
        return found

    def stored(self, name: str) -> str:
        """The name that a tensor, or a module, is stored by which is not stored with others."""
        return self._conversions.stored(name) if self._conversions else name

    def own(self, name: str) -> str:
        """The inverse of it; the name itself where the model has no such tensor."""
        return self._conversions.own(name, self._names) if self._conversions else name

    def renamed(self, name: str) -> str:
        """What transformers makes of a stored name, whether or not the model has such a tensor."""
        return self._conversions.own(name) if self._conversions else name

    def store(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors that are not packed, as a checkpoint has them; a stack becomes one matrix per expert."""
        if self._conversions is not None:
            return {name: one.contiguous() for name, one in self._conversions.store(tensors).items()}
        return split_stacks(self.parts, self.stacks, tensors)

    def load(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of it."""
        if self._conversions is not None:
            return self._conversions.load(tensors, self._names)
        return join_stacks(self.parts, self.stacks, tensors)


def _rows(layer: nn.Module) -> int:
    return layer.out_features if isinstance(layer, PackedLinear) else weight_of(layer).shape[0]


def _chosen(layers: Iterable[str], rows: Mapping[str, Tensor], chosen: Tensor) -> LayerRows:
    """The rows ``chosen`` of those that some layers have."""
    layers = tuple(layers)
    whole = torch.cat([rows[layer] for layer in layers])
    if torch.equal(whole, chosen):
        return LayerRows(layers)
    order = whole.argsort()
    return LayerRows(layers, order[torch.searchsorted(whole[order], chosen)])
