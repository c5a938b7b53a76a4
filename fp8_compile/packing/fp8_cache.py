"""Caches of keys and values in FP8, for models of transformers: half the bytes of a long context.

    cache = fp8_compile.Fp8Cache(model)                           grows with the text
    cache = fp8_compile.Fp8Cache(model, max_cache_len=4096)       of a fixed size, for compiled code
    model.generate(ids, past_key_values=cache)

A layer of such a cache is one of transformers' own, which stores rows of bytes instead of vectors
(``kernels/fp8_cache.py``): how a cache grows, slides, is cut, or is repeated for beams stays transformers' business.
What a layer returns are keys and values in the model's dtype, so every way to compute attention is right; compiled code
for a few queries reads the rows themselves (``passes/joint/read_fp8_cache.py``).
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Iterable, Mapping

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from fp8_compile.kernels import fp8_cache

from .use_fp8_cache import SCALES, cache_scales

log = logging.getLogger("fp8_compile")

# By layer of the cache: scales of keys and of values, FP32 [groups].
Scales = Mapping[int, tuple[Tensor, Tensor]]
PLAIN = (DynamicLayer, StaticLayer)


class Fp8Cache(Cache):
    """Keys and values in E4M3.

    ``model``: the model, or its config. ``max_cache_len``: how many tokens a static cache holds; without it the cache
    grows. ``scales``: static ones, from ``Fp8Cache.calibrate`` or a checkpoint, by layer and head; those that the model
    was packed with by default, and where there are none, each token of each head has a scale of its own.
    """

    def __init__(self, model: Any, max_cache_len: int | None = None, scales: Scales | None = None) -> None:
        config = getattr(model, "config", model)
        if not hasattr(config, "get_text_config"):
            raise TypeError(f"Fp8Cache: expected a model of transformers or its config, got {type(model).__name__}")
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"Fp8Cache: max_cache_len expects at least 1 token, got {max_cache_len}")
        made = DynamicCache(config=config) if max_cache_len is None else StaticCache(config, max_cache_len)
        super().__init__(layers=made.layers)
        store_fp8(self, scales_of(model) if scales is None else scales)

    @staticmethod
    def calibrate(model: Any, batches: Iterable[Any]) -> Scales:
        """Static scales, amax / 448 of keys and of values over some batches (tensors, tuples or dicts of arguments)."""
        return cache_scales(model, batches)


class Fp8Layer:
    """What a layer of transformers' caches gets beside its own class."""

    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.dtype != torch.uint8:  # ahead of the first update: of no tokens yet
            key_states, value_states = self._rows(key_states, value_states)
        super().lazy_initialization(key_states, value_states)  # type: ignore[misc]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        dtype = key_states.dtype
        rows = self._rows(key_states, value_states)
        keys, values = super().update(*rows, *args, **kwargs)  # type: ignore[misc]
        return (
            fp8_cache.dequantize_op(keys, self.key_scales, dtype),
            fp8_cache.dequantize_op(values, self.value_scales, dtype),
        )

    def _rows(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return fp8_cache.quantize_op(keys, self.key_scales), fp8_cache.quantize_op(values, self.value_scales)


def store_fp8(cache: Cache, scales: Scales | None = None) -> None:
    """Let a cache, which must be empty, store FP8 from now on. Layers without keys and values stay as they are."""
    if getattr(cache, "layer_class_to_replicate", None) is not None:
        cache.layer_class_to_replicate = fp8_layer(cache.layer_class_to_replicate)
    exact = []
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        own: Any = type(layer)
        kind = fp8_layer(own)
        if kind is own:
            exact.append(own.__name__)
            continue
        if layer.is_initialized:
            raise ValueError("a cache that has keys and values in it can't become an FP8 one; expected an empty cache")
        layers[index] = made = _rebuilt(own)
        vars(made).update(vars(layer))
        if scales is not None and index in scales:
            made.key_scales, made.value_scales = scales[index]
    if exact:
        log.info("layers of the cache that stay exact: %s", ", ".join(sorted(set(exact))))


@functools.cache
def fp8_layer(kind: type) -> type:
    """The class of a layer of transformers' caches, with rows in FP8; itself where it stores something else."""
    # Caches that store more than keys and values, or compress them, have updates of their own.
    if issubclass(kind, Fp8Layer) or not issubclass(kind, PLAIN) or _own_update(kind):
        return kind
    return type(
        f"Fp8{kind.__name__}", (Fp8Layer, kind), {"__module__": __name__, "__reduce__": _reduce, "_layer_type": None}
    )


def _own_update(kind: type) -> bool:
    known = ("transformers.cache_utils",)
    return kind.__module__ not in known or "Indexed" in kind.__name__ or "Quantized" in kind.__name__


def _reduce(layer: Any) -> tuple[Any, ...]:
    """For copy and pickle: the class is made, not imported."""
    return _rebuilt, (type(layer).__mro__[2],), layer.__dict__


def _rebuilt(kind: type) -> Any:
    made: Any = fp8_layer(kind)
    return made.__new__(made)


def scales_of(model: Any) -> Scales | None:
    """The static scales that a model was packed, or loaded, with."""
    found: Scales | None = getattr(model, SCALES, None)
    return found
