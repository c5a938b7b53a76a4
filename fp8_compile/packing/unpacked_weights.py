"""Parameters that a module multiplies by and that don't belong to a linear layer: a report has one row for each.

Embeddings, convolutions and what is added (biases, positions) are not such weights. The kind of the module and the
names of its parameters tell which is which; a router, an RNN or an unknown stack of matrices has its row.
"""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fp8_compile.torch_internals.modules import NORMS_AND_CONVOLUTIONS

from .packed_weight import PackedWeight

NO_PRODUCTS = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    *NORMS_AND_CONVOLUTIONS,
    nn.PReLU,
    ParametrizationList,  # the module that it belongs to has the row
)
NO_WEIGHT = re.compile("bias|embed|token|pos|scale|norm")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def unpacked_weights(root: nn.Module, known: set[int]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and reason of each parameter that is a matrix or a stack of them, by its dotted name; ``known`` are the ids
    of the parameters that have a row already."""
    found = {}
    for name, module in root.named_modules():
        if isinstance(module, (*NO_PRODUCTS, PackedWeight)) or "Embedding" in type(module).__name__:
            continue
        for own, parameter in module._parameters.items():
            if parameter is None or id(parameter) in known or NO_WEIGHT.search(own):
                continue
            if parameter.dim() in (2, 3) and min(parameter.shape[-2:]) > 1:
                found[f"{name}.{own}".strip(".")] = tuple(parameter.shape), _reason(module, parameter)
    return found


def _reason(module: nn.Module, parameter: nn.Parameter) -> str:
    kind = type(module).__name__
    if not parameter.is_floating_point() or parameter.dtype not in FLOATS:
        return f"dtype {str(parameter.dtype).removeprefix('torch.')}"
    if parameter.dim() == 3:
        return f"a stack of {parameter.shape[0]} matrices, which {kind} multiplies by in a way that is not known here"
    return f"{kind} multiplies by it in a forward of its own"
