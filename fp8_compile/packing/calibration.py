"""What calibration knows of a model's layers: the largest input, and the Hessian of the output's squared error.

    amax(name)    = max |x|                        x: inputs of the layer, [tokens, K]
    mean(name)    = mean over tokens of x          [K]
    hessian(name) = mean over tokens of x x^T      [K, K]

Activations are not kept. Layers that get the very same tensor (q, k and v) share one Hessian: they are put together
when they are first seen, and told apart, each with what it saw, as soon as their inputs differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fp8_compile.torch_internals import autograd

from .linear_layers import natural_key


class Calibration:
    """Statistics of the inputs of linear layers, by dotted name; ``fp8_compile.calibrate`` makes one."""

    def __init__(self, *, hessians: bool = True, batches: Sequence[Any] | None = None) -> None:
        self.keeps_hessians = hessians
        self.batches = batches  # to run again, for layers whose inputs packing has changed
        self._amax: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._sums: dict[str, Tensor] = {}
        self._shared: dict[str, _Shared] = {}
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()  # input of this batch -> what it gave

    @property
    def names(self) -> list[str]:
        return list(self._amax)

    def amax(self, name: str) -> Tensor:
        """Largest magnitude of the layer's inputs, FP32 []."""
        return self._amax[self._known(name)]

    def tokens(self, name: str) -> int:
        """How many rows the layer's inputs had."""
        return self._tokens[self._known(name)]

    def mean(self, name: str) -> Tensor:
        """Mean of the layer's inputs, FP32 [K]."""
        return self._sums[self._known(name)] / self._tokens[name]

    def hessian(self, name: str) -> Tensor:
        """Hessian of the layer's output error, FP32 [K, K]."""
        self._known(name)
        if not self.keeps_hessians:
            raise ValueError(f"{name}: this calibration has no Hessians; calibrate with hessians=True")
        return self._shared[name].total / max(self._tokens[name], 1)

    def shares(self, name: str, other: str) -> bool:
        """True if two layers got the same inputs throughout."""
        return (
            self.keeps_hessians and self._shared.get(name) is not None and self._shared[name] is self._shared.get(other)
        )

    def groups(self) -> list[tuple[str, ...]]:
        """Layers in the order in which they ran, those that share their inputs together."""
        by_group: dict[int, list[str]] = {}
        for name in self._amax:
            by_group.setdefault(id(self._shared.get(name, name)), []).append(name)
        return [tuple(sorted(names, key=natural_key)) for names in by_group.values()]

    def memory_bytes(self) -> int:
        """How many bytes the Hessians take."""
        return sum(one.total.nbytes for one in {id(one): one for one in self._shared.values()}.values())

    def record(self, name: str, x: Tensor) -> None:
        """Count one call of a layer."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if not rows.shape[0]:
            return
        amax = rows.abs().amax().to(torch.float32)
        if not amax.isfinite():
            raise ValueError(
                f"{name}: its input has Inf or NaN, expected finite ones; calibrate in a wider dtype (model.float())"
            )
        self._amax[name] = torch.maximum(self._amax[name], amax) if name in self._amax else amax
        self._tokens[name] = self._tokens.get(name, 0) + rows.shape[0]
        total = rows.sum(0, dtype=torch.float32)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        if self.keeps_hessians:
            self._record_hessian(name, x, rows)

    def end_batch(self) -> None:
        """Tell apart the layers whose inputs differed in this batch."""
        for shared in {id(one): one for one in self._shared.values()}.values():
            for names, added in shared.split():
                self._shared.update(dict.fromkeys(names, added))
            shared.young = False
        self._seen = WeakIdKeyDictionary()

    def _record_hessian(self, name: str, x: Tensor, rows: Tensor) -> None:
        version = autograd.version(x)
        seen = self._seen.get(x)
        if seen is None or seen.version != version:
            wide = rows.to(torch.float32)
            seen = self._seen[x] = _Input(wide.t() @ wide, version)
        shared = self._shared.get(name)
        if shared is None:
            if seen.maker is not None and seen.maker.young and seen.maker.grams == [seen.gram]:
                shared = self._shared[name] = seen.maker
                shared.pending[name] = []
                return
            shared = self._shared[name] = _Shared(torch.zeros_like(seen.gram), {name: []})
        shared.add(name, seen.gram)
        seen.maker = seen.maker or shared

    def _known(self, name: str) -> str:
        if name not in self._amax:
            raise ValueError(
                f"{name!r} was not calibrated: no linear layer of that name ran. Calibrated: "
                f"{', '.join(list(self._amax)[:8]) or 'none'}{', ...' if len(self._amax) > 8 else ''}"
            )
        return name


@dataclasses.dataclass
class _Input:
    """A tensor that went into a layer in this batch: x^T x of it, and the version that it had."""

    gram: Tensor
    version: int
    maker: _Shared | None = None  # whose first input of this batch it was


class _Shared:
    """A sum of x x^T, and the layers that share it."""

    def __init__(self, total: Tensor, pending: dict[str, list[Tensor]]) -> None:
        self.total, self.pending = total, pending
        self.young = True  # until the end of its first batch others may join
        self.grams: list[Tensor] = []  # what its first batch gave, while young

    def add(self, name: str, gram: Tensor) -> None:
        self.pending[name].append(gram)
        if self.young:
            self.grams.append(gram)
        if all(_same(grams, self.pending[name]) for grams in self.pending.values()):
            self.total += gram if len(self.pending[name]) == 1 else sum(self.pending[name][1:], self.pending[name][0])
            for grams in self.pending.values():
                grams.clear()

    def split(self) -> Iterable[tuple[list[str], _Shared]]:
        """At the end of a batch, the layers that saw something other than the first, with sums of their own."""
        self.grams = []
        parts: list[list[str]] = []
        for name, grams in self.pending.items():
            part = next((part for part in parts if _same(self.pending[part[0]], grams)), None)
            parts.append([name]) if part is None else part.append(name)
        before = self.total.clone() if len(parts) > 1 else self.total
        pending = self.pending
        for index, part in enumerate(parts):
            owner = self if index == 0 else _Shared(before.clone(), {})
            for gram in pending[part[0]]:
                owner.total += gram
            owner.pending, owner.young = {name: [] for name in part}, False
            if index:
                yield part, owner


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right))
