"""Which layers of a model are its output heads, by what they are and not only by their names.

Output heads lose most by 8 bits and gain least: one layer in many. A layer is one where

    tied    its weight is that of an embedding of the model
    wide    it is the last product of its graph with a weight, and as wide as the vocabulary of a token embedding
    named   its name says so (``OUTPUT_HEADS``)

Ties and widths are looked up in the tree of modules, which is the same for every graph: a graph break before the head
changes nothing.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Iterator, Mapping

from torch import Tensor, fx, nn

from .torch_internals.modules import WRAPPED

# By the last component that is a name.
OUTPUT_HEADS = ("lm_head", "embed_out", "output_head", "head")
NAMED = "excluded: output head"


def output_heads(root: nn.Module, gm: fx.GraphModule, tensors: Mapping[fx.Node, Any]) -> dict[int, str]:
    """``id(weight)`` -> reason, for the heads of a model in one graph; ``tensors`` are the values of the inputs."""
    candidates = _Candidates(root)
    wide: dict[int, str] = {}
    for layer, why in candidates.wide:
        weights = _matrices(layer)
        if _is_last(weights, gm, tensors):
            wide.update(dict.fromkeys(weights, why))
    return {**candidates.named, **wide, **candidates.tied}


def head_candidates(root: nn.Module) -> dict[int, bool]:
    """``id(weight)`` of what may be a head of a model; True: it is one in any case; False: if it is the last product of
    its graph, which is the same for two models with the same graph."""
    candidates = _Candidates(root)
    wide = {weight: False for layer, _ in candidates.wide for weight in _matrices(layer)}
    return wide | dict.fromkeys((*candidates.named, *candidates.tied), True)


class _Candidates:
    """What a tree of modules tells of its output heads."""

    def __init__(self, root: nn.Module) -> None:
        embeddings = dict(_embeddings(root))
        self.tied = {id(table.weight): f"{NAMED}, tied to the embedding {name}" for name, table in embeddings.items()}
        self.wide = [
            (layer, f"{NAMED}, as wide as the vocabulary of {_vocabulary(layer, embeddings)}")
            for _, layer in _singular(_wide_layers(root, embeddings))
        ]
        layers = [layer for name, layer in root.named_modules() if own_name(name) in OUTPUT_HEADS]
        self.named = {id(parameter): NAMED for layer in layers for parameter in layer.parameters(recurse=False)}


def own_name(module: str) -> str:
    """The last component that is a name: ``head`` of ``head.0``, and of what ``torch.compile`` wrapped there."""
    parts = reversed(module.split("."))
    return next((part for part in parts if not part.isdigit() and part != WRAPPED), "")


def _embeddings(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in root.named_modules():
        sized = isinstance(getattr(module, "num_embeddings", None), int) and hasattr(module, "embedding_dim")
        if sized and isinstance(getattr(module, "weight", None), Tensor):
            yield name, module


def _vocabulary(layer: nn.Module, embeddings: Mapping[str, nn.Module]) -> str | None:
    """The token embedding that has a row for each output of a layer.

    A table of positions is not one: its name says so, or it has no more rows than columns. Nor is a square layer a
    head, whatever tables happen to have as many rows.
    """
    inputs, outputs = _features(layer)
    for name, table in embeddings.items():
        positions = own_name(name) == "wpe" or "pos" in own_name(name).lower()
        if inputs != outputs == table.num_embeddings > table.embedding_dim and not positions:  # type: ignore[operator]
            return name
    return None


def _wide_layers(root: nn.Module, embeddings: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    return [(name, layer) for name, layer in root.named_modules() if _vocabulary(layer, embeddings) is not None]


def _singular(layers: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The layers without those that every block has, ``blocks.0.up`` and ``blocks.1.up``: they too may be the last of
    their graph, before a graph break."""
    layers = list(layers)
    patterns = [re.sub(r"\d+", "*", name) for name, _ in layers]
    return [layer for layer, pattern in zip(layers, patterns) if patterns.count(pattern) == 1]


def _features(layer: nn.Module) -> tuple[int | None, int | None]:
    """(in, out) of a linear layer, transformers' Conv1D included."""
    if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
        return layer.in_features, layer.out_features  # type: ignore[return-value]
    return getattr(layer, "nx", None), getattr(layer, "nf", None)


def _matrices(layer: nn.Module) -> set[int]:
    return {id(parameter) for parameter in layer.parameters() if parameter.dim() > 1}


def _is_last(weights: set[int], gm: fx.GraphModule, tensors: Mapping[fx.Node, Any]) -> bool:
    """True if nothing in the graph that is computed from the products with these weights is multiplied by another
    weight. What is looked up in an embedding by an index, as the next token is, is not counted among that."""
    inputs = {node for node, tensor in tensors.items() if id(tensor) in weights}
    others = {
        node
        for node, tensor in tensors.items()
        if isinstance(tensor, nn.Parameter) and tensor.dim() > 1 and node not in inputs
    }
    first = {user for node in inputs for user in node.users}
    after = list(first)
    seen = set(first)
    for node in after:
        if node not in first and others & set(node.all_input_nodes):
            return False
        new = [user for user in node.users if user not in seen and "embedding" not in str(user.target)]
        seen.update(new)
        after += new
    return True
