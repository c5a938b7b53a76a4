"""``pack(model, scales="training")``: one grid from training to serving.

Every weight is packed as the forward of its training quantizes it, and every input is rounded as it is there. What
training left in high precision stays as it is.
"""

from __future__ import annotations

from typing import Mapping, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fp8_compile.scaling.training_grids import TrainingGrid, grids_of

from .choose import choose_weights
from .input_scales import shared_scales
from .linear_layers import unwrapped
from .pack_report import PackRow
from .packable import LayerWeight, Packable, StackWeight
from .packed_block_scaled import MXFP8Stack
from .packed_experts import FP8Stack, PackedStack, replace_stack
from .packed_linear import PackedLinear
from .packed_weight import PackedWeight
from .trained_grids import Recipe, convert, input_scale, quantized, recipe_of

HIGH_PRECISION = "training multiplies by it in high precision"


class TrainedPacker:
    """Packs the weights of ``root`` by the grids that the weights of the same names have in ``trained``: itself, or the
    model that it is a copy of."""

    def __init__(self, root: nn.Module, trained: nn.Module, format: str | None) -> None:
        self.root, self.format = root, format
        self.parameters = dict(trained.named_parameters(remove_duplicate=False))
        self.names = {id(one): name for name, one in root.named_parameters(remove_duplicate=False)}
        self.rows: list[PackRow] = []
        self.done: dict[int, PackedWeight] = {}  # by id of the parameter

    def pack(self, include: Sequence[str], exclude: Sequence[str], progress: bool) -> list[PackRow]:
        layers, stacks, skipped = choose_weights(self.root, include, exclude)
        weights: dict[str, Packable] = {name: LayerWeight(layer) for name, layer in layers.items()}
        weights |= {name: StackWeight(stack) for name, stack in stacks.items()}
        grids = {name: self._grids(weight.parameter) for name, weight in weights.items()}
        found = {name: grid for name, grid in grids.items() if grid}
        if not found:
            raise ValueError(_untrained(self.root, skipped))
        recipes = {name: self._recipe(name, grid[0]) for name, grid in found.items()}
        own = {name: input_scale(grids) for name, grids in found.items()}
        scales = shared_scales({name: scale for name, scale in own.items() if scale is not None})
        for name in tqdm(found, desc="pack as trained", disable=not progress):
            self._pack(name, weights[name], found[name], recipes[name], scales.get(name))
        left = [PackRow(name, weights[name].shape, reason=HIGH_PRECISION) for name in grids if name not in found]
        return [*self.rows, *left, *skipped]

    def _grids(self, parameter: nn.Parameter) -> list[TrainingGrid]:
        known = self.parameters.get(self.names.get(id(parameter), ""))
        return grids_of(known) if known is not None else []

    def _recipe(self, name: str, grid: TrainingGrid) -> Recipe:
        recipe = recipe_of(name, grid)
        if self.format is not None and self.format != recipe.format.name:
            raise ValueError(
                f"{name}: format={self.format!r}, but it was trained with recipe={grid.recipe!r}, whose grid is that "
                f"of format={recipe.format.name!r}; leave format out"
            )
        return recipe

    def _pack(
        self, name: str, weight: Packable, grids: list[TrainingGrid], recipe: Recipe, inputs: Tensor | None
    ) -> None:
        grid, parameter, shape = grids[0], weight.parameter, weight.shape
        key, dtype, before = id(parameter), parameter.dtype, parameter.nbytes
        scale, reason = grid.weight_scale(parameter), []
        if len(grids) > 1:
            reason.append(f"{len(grids)} uses, of whose inputs the largest scale")
        if grid.weight is not None and scale is None:
            reason.append("its own scale: it has outgrown its history")
        error, after = float("nan"), 0
        if isinstance(weight, StackWeight):
            matrices = [quantized(one.label, one.values, grid, scale) for one in weight.matrices(name)]
            error = _error([one.values for one in weight.matrices(name)], matrices)
            packed: PackedStack = recipe.format.stack.of(matrices, dtype, weight.stack.transposed)
            replace_stack(weight.stack.module, weight.stack.name, packed)
            if isinstance(packed, FP8Stack):
                packed.use_activations(recipe.activations, inputs)
            elif isinstance(packed, MXFP8Stack):
                packed.use_activations(recipe.activations)
            reason.append(packed.inputs if isinstance(packed, (FP8Stack, MXFP8Stack)) else "inputs exact")
            after = packed.memory_bytes()
        elif isinstance(weight, LayerWeight) and (twin := self.done.get(key)) is not None:
            assert isinstance(twin, PackedLinear)
            layer = twin.lend(weight.layer)
            layer.use_activations(recipe.activations, inputs)
            reason += ["tied", layer.inputs]
        elif isinstance(weight, LayerWeight):
            (one,) = weight.matrices(name)
            matrix = quantized(one.label, one.values, grid, scale)
            error = _error([one.values], [matrix])
            layer = convert(weight.layer, matrix, recipe, dtype, inputs, grid)
            self.done[key] = layer
            reason.append(layer.inputs)
            after = layer.memory_bytes()
        words = "; ".join(filter(None, reason))
        self.rows.append(PackRow(name, shape, recipe.format.name, grid.recipe, before, after, error, words))


def pack_as_trained(
    root: nn.Module,
    scales: str | nn.Module,
    format: str | None,
    include: Sequence[str],
    exclude: Sequence[str],
    progress: bool,
) -> list[PackRow]:
    """The rows of the report; see ``pack``."""
    if isinstance(scales, str) and scales != "training":
        raise ValueError(
            f"scales={scales!r} is unknown; expected None, 'training', or the trained model that this one is a copy of"
        )
    trained = root if isinstance(scales, str) else unwrapped(scales)
    return TrainedPacker(root, trained, format).pack(include, exclude, progress)


def check_arguments(given: Mapping[str, object]) -> None:
    """Raise for arguments of ``pack`` that training's grid leaves no choice about; ``given`` has those that are set."""
    if given:
        raise ValueError(
            f"{', '.join(given)}: scales='training' takes weights and inputs as training has them; leave it out"
        )


def _error(before: Sequence[Tensor], after: Sequence) -> float:
    pairs = [(one.to(torch.float32), other.dequantize()) for one, other in zip(before, after)]
    wrong = sum(float((one - other).square().sum()) for one, other in pairs)
    return (wrong / max(sum(float(one.square().sum()) for one, _ in pairs), 1e-30)) ** 0.5


def _untrained(root: nn.Module, skipped: Sequence[PackRow]) -> str:
    packed = any(row.reason == "packed already" for row in skipped)
    unseen = "no training forward of backend='fp8' has quantized its weights"
    why = "its layers are packed already" if packed else unseen
    return (
        f"scales='training': {type(root).__name__} has no grid to take: {why}. Expected a forward with gradients of "
        "torch.compile(model, backend='fp8') in this process: run one batch after loading a checkpoint. Of a copy of "
        "the model, say scales=model with the model that was trained"
    )
