"""Let a model of transformers store its keys and values in FP8 whenever it generates, and find static scales for it."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fp8_compile.kernels.formats import E4M3
from fp8_compile.torch_internals.transformers import change_caches, makes_caches

from .calibrate import evaluating
from .calibration import Calibration

# What ``pack`` takes: a scale for each token of each head, or one for each head, from the calibration's batches.
KINDS = (None, "fp8", "fp8_static")
SCALES = "_fp8_cache_scales"
Scales = dict[int, tuple[Tensor, Tensor]]


def check_kind(kv_cache: str | None, root: nn.Module) -> None:
    """Raise a ValueError unless a model can have such a cache."""
    if kv_cache not in KINDS:
        raise ValueError(f"kv_cache={kv_cache!r} is unknown; expected one of: {', '.join(map(repr, KINDS))}")
    if kv_cache is not None and not makes_caches(root):
        raise ValueError(
            f"kv_cache={kv_cache!r} is for models of transformers that generate text, got {type(root).__name__}; leave "
            "kv_cache out"
        )


def batches_for(kv_cache: str | None, calibration: Calibration | None) -> Sequence[Any]:
    """The batches that static scales come from; a ValueError where there are none to be had."""
    if kv_cache != "fp8_static":
        return ()
    if calibration is None or not calibration.batches:
        raise ValueError(
            "kv_cache='fp8_static' takes its scales from the calibration's batches and has none; expected "
            "calibration=fp8_compile.calibrate(model, batches) with a list of batches, or kv_cache='fp8'"
        )
    return calibration.batches


def use_fp8_cache(root: nn.Module, scales: Mapping[int, tuple[Tensor, Tensor]] | None = None) -> None:
    """From now on ``generate`` makes FP8 caches, and ``Fp8Cache(model)`` has these scales."""
    setattr(root, SCALES, dict(scales or {}))
    change_caches(root, _store_fp8)


def _store_fp8(model: nn.Module, cache: Any) -> None:
    from .fp8_cache import store_fp8

    store_fp8(cache, getattr(model, SCALES, None))


def cache_scales(model: nn.Module, batches: Iterable[Any]) -> Scales:
    """Static scales, amax / 448 of keys and of values over some batches, by layer and head."""
    from transformers import DynamicCache

    largest: dict[int, list[Tensor]] = {}
    config: Any = model.config

    class Recorder(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            found = [one.detach().to(torch.float32).abs().amax((0, 2, 3)) for one in (key_states, value_states)]
            before = largest.get(layer_idx, found)
            largest[layer_idx] = [torch.maximum(old, new) for old, new in zip(before, found)]
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    with evaluating(model), torch.no_grad():
        for batch in batches:
            given = {"past_key_values": Recorder(config=config), "use_cache": True}
            if isinstance(batch, Mapping):
                model(**{**{key: value for key, value in batch.items() if key != "labels"}, **given})
            else:
                model(*(batch if isinstance(batch, (tuple, list)) else (batch,)), **given)
    if not largest:
        raise ValueError(
            f"{type(model).__name__} stored no keys and values; expected a model that takes past_key_values"
        )
    return {layer: (_scale(keys), _scale(values)) for layer, (keys, values) in largest.items()}


def _scale(amax: Tensor) -> Tensor:
    if not amax.isfinite().all():
        raise ValueError("keys or values of the calibration are Inf or NaN, expected finite ones; see its batches")
    return torch.where(amax == 0, 1.0, amax / E4M3.max)
