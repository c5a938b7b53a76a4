"""FP8 copies of a model's weights, made once an optimizer step and read by every forward and backward until the next.

    copy: q = fp8(w * quant_scale), and its transpose for GPUs that want K contiguous; quant_scale from the history of
          the weight's slot

A copy is as new as its weight: before a forward reads it, the weight's identity, address and version counter are
compared with those it was made from, and all weights of the model that changed are quantized in one launch. What
changes a weight without its version counter knowing: an optimizer's fused kernel, so each ``step()`` of any optimizer
marks what it has in its groups; writing through ``.data``, which nobody can see: call :meth:`WeightCache.invalidate`.

Without a copy stay the weights of FSDP: each rank would have copies of all of them, which is what sharding is against.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Iterable, Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fp8_compile.kernels.cpu.quantize import quantize_delayed_op
from fp8_compile.kernels.delayed_scaling import DEQUANT, QUANT, cast_delayed, first_scale
from fp8_compile.kernels.formats import E4M3, E5M2
from fp8_compile.kernels.quantize import WHOLE, block_amax
from fp8_compile.kernels.record_amax import record_amax
from fp8_compile.passes.slot import Place, Slot

if TYPE_CHECKING:
    from .scaling_state import ScalingState


@dataclasses.dataclass(eq=False)
class CachedWeight:
    """One weight's copy. ``slot`` is None until a graph has asked for it."""

    codes: Tensor
    transposed: Tensor | None
    slot: Slot | None = None
    place: Place | None = None
    via: torch.dtype | None = None  # rounded to that dtype first, as autocast does
    weight: weakref.ref[Tensor] | None = None  # that the copy was made from, or will be
    seen: tuple[Tensor, int, int] | None = None  # its memory, kept lest another get its address, and versions
    marked: bool = False  # as changed, whatever its version says
    epoch: int = -1  # of the state, when the copy was made: replaced histories give other scales
    primed: int = -1  # the epoch in which the slot was found to have a history

    def is_stale(self, weight: Tensor, epoch: int) -> bool:
        if self.marked or self.epoch != epoch or self.seen is None or self.current() is not weight:
            return True
        memory, *versions = self.seen
        now = local(weight)
        return now.data_ptr() != memory.data_ptr() or versions != [weight._version, now._version]

    def made_from(self, weight: Tensor, epoch: int) -> None:
        now = local(weight).detach()
        self.marked, self.epoch, self.weight = False, epoch, weakref.ref(weight)
        self.seen = now, weight._version, local(weight)._version

    def current(self) -> Tensor | None:
        """That weight, while it is there."""
        return self.weight() if self.weight is not None else None

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.codes, self.transposed) if tensor is not None]


class WeightCache:
    """The copies of one model: ``ScalingState.weights``, while an optimizer is attached."""

    def __init__(self, state: ScalingState) -> None:
        self.state = state
        self.known: dict[int, Tensor] = {}  # by page: the scales that the copies were made with, as Page.scales
        self.refreshes = 0
        self._offered: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> copy, for graphs to come
        self._read: list[weakref.ref[CachedWeight]] = []  # by graphs, which may run with other weights than at first
        self._launches: Any = None
        self._rows: dict[int, tuple[list[int], Tensor]] = {}  # by page: which were renewed last, there on the device
        _caches.add(self)

    def entry(self, weight: Tensor, dtype: torch.dtype, *, transposed: bool) -> CachedWeight:
        """The copy of a weight, an empty one if there is none yet."""
        if weight not in self._offered:
            rows, cols = local(weight).shape
            device = local(weight).device
            with _real_unless_fake(weight):
                codes = torch.empty(rows, cols, dtype=dtype, device=device)
                turned = torch.empty(cols, rows, dtype=dtype, device=device) if transposed else None
            self._offered[weight] = CachedWeight(codes, turned, weight=weakref.ref(weight))
        return self._offered[weight]

    def keep(self, entry: CachedWeight) -> None:
        """A graph reads this copy."""
        if not any(entry is one() for one in self._read):
            self._read.append(weakref.ref(entry))

    def drop(self, weight: Tensor) -> None:
        """Forget a copy that no graph reads, and free its memory: the graph that it was offered to keeps the tensor."""
        entry = self._offered.pop(weight, None)
        for tensor in entry.tensors() if entry else ():
            tensor.untyped_storage().resize_(0)

    def known_scales(self, page: int) -> Tensor:
        if page not in self.known:
            scales = self.state.pages[page].scales
            with _real_unless_fake(scales):
                self.known[page] = torch.zeros_like(scales)
        return self.known[page]

    def invalidate(self, weights: Iterable[Tensor] | None = None) -> None:
        """Have weights (all of them) quantized again before they are next read."""
        chosen = None if weights is None else {id(weight) for weight in weights}
        for entry in self.copies():
            entry.marked |= chosen is None or id(entry.current()) in chosen

    def distrust(self) -> None:
        """Quantize every weight again before the next training forward, whatever its version says."""
        self.invalidate()

    def copies(self) -> list[CachedWeight]:
        """Every copy that a graph reads."""
        return [entry for entry in (one() for one in self._read) if entry is not None]

    @property
    def entries(self) -> dict[Slot, CachedWeight]:
        """The copies by slot."""
        return {entry.slot: entry for entry in self.copies() if entry.slot is not None}

    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self.copies() for tensor in entry.tensors())

    def ensure_fresh(self, weights: Mapping[CachedWeight, Tensor]) -> None:
        """Before a graph that reads these copies of these weights runs: if one is stale, renew all that are."""
        epoch = self.state.epoch
        if not any(entry.is_stale(weight, epoch) for entry, weight in weights.items()):
            return
        others = {entry: entry.current() for entry in self.copies()}
        pairs = {entry: weight for entry, weight in {**others, **weights}.items() if weight is not None}
        stale = {entry: weight for entry, weight in pairs.items() if entry.is_stale(weight, epoch)}
        with torch.no_grad():
            self._refresh(stale)

    def _refresh(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        pages = sorted({entry.place.page for entry in stale})  # type: ignore[union-attr]
        for page in pages:
            self.state.settle_page(page)  # what the pass that begins would do first
        on_gpu = {entry: weight for entry, weight in stale.items() if local(weight).device.type != "cpu"}
        for entry, weight in stale.items():
            if entry not in on_gpu:
                self._quantize_on_cpu(entry, local(weight))
        if on_gpu:
            self._quantize_on_gpu(on_gpu)
        for entry, weight in stale.items():
            increment_version(entry.tensors())  # a backward to come must not read what its forward did not
            entry.made_from(weight, self.state.epoch)
        increment_version([self.known[page] for page in pages])
        self.refreshes += 1

    def _quantize_on_cpu(self, entry: CachedWeight, weight: Tensor) -> None:
        page, row = self.state.pages[entry.place.page], entry.place.row  # type: ignore[union-attr]
        x = weight if entry.via is None else weight.to(entry.via)
        scale, dtype = page.scales[QUANT, row].view(1, 1), entry.codes.dtype
        if dtype in (E4M3.dtype, E5M2.dtype):
            codes, used, dequant_scale, amax = quantize_delayed_op(x, scale, dtype, True)
        else:
            amax = block_amax(x, (WHOLE, WHOLE))
            used = first_scale(scale, amax, page.kind.largest)
            codes, dequant_scale = cast_delayed(x, used, dtype), used.reciprocal()
        entry.codes.view(torch.uint8).copy_(codes.view(torch.uint8))
        if entry.transposed is not None:
            entry.transposed.view(torch.uint8).copy_(codes.view(torch.uint8).t())
        known = self.known[entry.place.page]  # type: ignore[union-attr]
        known[QUANT, row], known[DEQUANT, row] = used.view(()), dequant_scale.view(())
        record_amax(page.amaxes, amax, row)

    def _quantize_on_gpu(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        from fp8_compile.kernels.gpu.quantize_many import Matrix, QuantizeMany, addresses

        self._set_scales(stale)
        matrices = []
        for entry, weight in stale.items():
            place = entry.place
            assert place is not None
            scale, amax = self.known[place.page][QUANT, place.row], self.state.pages[place.page].amaxes[place.row]
            x = local(weight).detach()
            matrices.append(Matrix(x, entry.codes, entry.transposed, scale, amax, entry.via))
        # After a step it is the same weights at the same addresses as after the step before.
        if self._launches is None or self._launches.addresses != addresses(matrices):
            self._launches = QuantizeMany(matrices)
        self._launches()

    def _set_scales(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        """The scales to quantize with; of a slot without history, from the weight itself."""
        by_page: dict[int, list[int]] = {}
        for entry in stale:
            by_page.setdefault(entry.place.page, []).append(entry.place.row)  # type: ignore[union-attr]
        for index, rows in by_page.items():
            scales, at = self.state.pages[index].scales, self._on_device(index, rows)
            self.known[index].index_copy_(1, at, scales.index_select(1, at))
        unprimed = [entry for entry in stale if entry.primed != self.state.epoch]
        for entry in unprimed:
            page, row = self.state.pages[entry.place.page], entry.place.row  # type: ignore[union-attr]
            scale = page.scales[QUANT, row]
            if float(scale) > 0:  # waits for the device, on the first steps alone
                entry.primed = self.state.epoch
                continue
            weight = local(stale[entry])
            amax = block_amax(weight if entry.via is None else weight.to(entry.via), (WHOLE, WHOLE)).view(())
            used = first_scale(scale, amax, page.kind.largest)
            known = self.known[entry.place.page]  # type: ignore[union-attr]
            known[QUANT, row], known[DEQUANT, row] = used, used.reciprocal()

    def _on_device(self, page: int, rows: list[int]) -> Tensor:
        """Rows of a page as an index. A list of numbers would be copied to the device anew each step, which waits for
        all that the device has to do and can't be captured in a CUDA graph."""
        if page not in self._rows or self._rows[page][0] != rows:
            self._rows[page] = rows, torch.tensor(rows, device=self.known[page].device)
        return self._rows[page][1]


_caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Fused optimizers write to weights without raising their version counters (torch 2.13); so may others."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    for cache in list(_caches):
        cache.invalidate(weights)


register_optimizer_step_post_hook(_stepped)


def _real_unless_fake(like: Tensor) -> Any:
    """Where tensors are fake, those of a fake model are meant to be; others not."""
    return contextlib.nullcontext() if isinstance(like, FakeTensor) else unset_fake_temporarily()


def local(weight: Tensor) -> Tensor:
    """The part of a weight that lies on this rank: all of it but for a DTensor."""
    return getattr(weight, "_local_tensor", weight)
