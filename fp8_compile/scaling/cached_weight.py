"""The FP8 copy of one weight, and how it is told that the weight has changed since the copy was made."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fp8_compile.passes.graph.slot import Place, Slot
from fp8_compile.torch_internals.autograd import version
from fp8_compile.torch_internals.modules import local_part

if TYPE_CHECKING:
    from .weight_cache import WeightCache


@dataclasses.dataclass(eq=False)
class CachedWeight:
    """One weight's copy, for every graph that reads it."""

    cache: WeightCache  # that renews it: of the model which had the weight first
    slot: Slot
    at: Place  # of the slot, in the tables of the cache's state
    codes: Tensor
    transposed: Tensor | None
    scales: Tensor  # [2] fp32, the quant_scale that the copy was made with and its inverse
    weight: weakref.ref[Tensor]  # that the copy was made from, or will be
    via: torch.dtype | None = None  # rounded to that dtype first, as autocast does
    seen: tuple[Tensor, int, int, int] | None = None  # see made_from()
    marked: bool = False  # as changed, whatever its version says
    written: bool = False  # by someone who left its version as it was
    looked: bool = False  # made with the weight's own scale, because someone else than an optimizer had replaced it
    epoch: int = -1  # of the state, when the copy was made: replaced histories give other scales
    primed: int = -1  # the epoch in which the slot was found to have a history
    fingerprint: int | None = None  # of the weight, when the copy was made on a CPU
    fingerprints: Tensor | None = None  # on a GPU: where the kernel keeps it, once for each tile

    def is_stale(self, weight: Tensor, epoch: int) -> bool:
        if self.marked or self.written or self.epoch != epoch or self.seen is None or self.current() is not weight:
            return True
        _, address, whole, part = self.seen
        now = local_part(weight)
        if now.data_ptr() != address or version(now) != part:
            return True
        return now is not weight and version(weight) != whole

    def is_replaced(self, epoch: int) -> bool:
        """Of a stale copy: True if someone else than an optimizer wrote its weight, which may be of any size then."""
        return self.written or (not self.marked and self.seen is not None and self.epoch == epoch)

    def made_from(self, weight: Tensor, epoch: int) -> None:
        """The copy was made now. The memory of the weight is kept, so that no other tensor gets its address."""
        now = local_part(weight)
        self.marked, self.written, self.epoch, self.weight = False, False, epoch, weakref.ref(weight)
        self.seen = now.detach(), now.data_ptr(), version(weight), version(now)

    def current(self) -> Tensor | None:
        """That weight, while it is there."""
        return self.weight()

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.codes, self.transposed) if tensor is not None]
