"""What packing did to a language model, on some texts.

    perplexity = exp(mean over tokens of -log p(token | those before it))
    divergence = mean over tokens of sum_v p(v) log(p(v) / q(v))          p of the original, q of the packed model
    layer      = |x (w' - w)^T| / |x w^T|                                 x: what the layer gets in the packed model
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import Tensor, nn

from .checkpoints.save_and_load import packed_stacks
from .expert_stacks import expert_stacks
from .linear_layers import is_linear, weight_of
from .packed_linear import PackedLinear


class Comparison(NamedTuple):
    tokens: int
    before: float  # perplexity of the original
    perplexity: float
    divergence: float
    agreement: float  # the part of tokens where both find the same one likeliest
    layers: dict[str, float]


@torch.no_grad()
def perplexity(model: nn.Module, batches: Iterable[Tensor]) -> float:
    """Of rows of tokens, [B, T]."""
    total, count = 0.0, 0
    for ids in batches:
        logs = _logs(model, ids)
        total += float(_of_tokens(logs, ids).sum())
        count += ids[:, 1:].numel()
    return math.exp(-total / count)


@torch.no_grad()
def compare(original: nn.Module, packed: nn.Module, batches: Iterable[Tensor]) -> Comparison:
    """Run both models on rows of tokens, [B, T]."""
    sums = torch.zeros(4, dtype=torch.float64)  # log p, log q, divergence, agreement
    count = 0
    powers: dict[str, Tensor] = {}  # of the error and of the output
    with contextlib.ExitStack() as hooks:
        for name, layer in packed.named_modules():
            if isinstance(layer, PackedLinear):
                hook = layer.register_forward_pre_hook(_measure(powers, name, _twin(original, name, layer)))
                hooks.callback(hook.remove)
        for ids in batches:
            p, q = _logs(original, ids), _logs(packed, ids)
            same = p.argmax(-1) == q.argmax(-1)
            divergence = (p.exp() * (p - q)).sum(-1)
            parts = _of_tokens(p, ids), _of_tokens(q, ids), divergence, same
            sums += torch.stack([one.double().sum() for one in parts])
            count += ids[:, 1:].numel()
    before, after, divergence, same = (sums / count).tolist()
    layers = {name: float((wrong / whole.clamp(min=1e-30)).sqrt()) for name, (wrong, whole) in powers.items()}
    return Comparison(
        count, math.exp(-before), math.exp(-after), divergence, same, {**layers, **_experts(original, packed)}
    )


def _logs(model: nn.Module, ids: Tensor) -> Tensor:
    """log p of each next token, FP32 [B, T - 1, V]."""
    return model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)


def _of_tokens(logs: Tensor, ids: Tensor) -> Tensor:
    return logs.gather(-1, ids[:, 1:, None])


def _twin(original: nn.Module, name: str, layer: PackedLinear) -> Tensor:
    """The weight that a packed layer was made from."""
    try:
        found = original.get_submodule(name)
    except AttributeError:
        found = None
    expected = (layer.out_features, layer.in_features)
    if found is None or not is_linear(found) or tuple(weight_of(found).shape) != expected:
        raise ValueError(f"{name}: the original model has no such layer of {list(expected)}; expected the same model")
    return weight_of(found).detach()


def _measure(powers: dict[str, Tensor], name: str, weight: Tensor) -> Callable[..., None]:
    def before(layer: Any, args: tuple[Any, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1]).float()
        whole = weight.float()
        pair = torch.stack([(x @ (layer.dequantize() - whole).t()).square().sum(), (x @ whole.t()).square().sum()])
        powers[name] = powers.get(name, torch.zeros(2)) + pair.cpu()

    return before


def _experts(original: nn.Module, packed: nn.Module) -> dict[str, float]:
    plain, errors = expert_stacks(original), {}
    for name, stack in packed_stacks(packed).items():
        if name not in plain or tuple(plain[name].matrices.shape) != stack.shape:
            raise ValueError(f"{name}: the original model has no such experts; expected the same model")
        whole = plain[name].matrices.float()
        errors[name] = float((stack.dequantize() - whole).norm() / whole.norm().clamp(min=1e-30))
    return errors
