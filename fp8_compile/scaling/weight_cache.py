"""FP8 copies of a model's weights, made once per optimizer step and read by every training pass until the next.

    copy: q = fp8(w * quant_scale), and its transpose for GPUs that want K contiguous; quant_scale from the history of
          the weight's slot

A copy is as new as its weight. Before a training forward reads it, the weight's identity, address and version counters
are compared with those it was made from, and all weights of the model that changed are quantized in one launch. Three
things write to a weight without its version counters knowing:

- Fused optimizers. Each ``step()`` of any optimizer marks what it has in its groups.
- Writes through ``.data``, as most classes that average weights do them (EMA). A fingerprint of a sample of the weight
  (``kernels/fingerprint.py``) is compared as well: by the host for weights on a CPU; on a GPU by the kernel that
  quantizes, which the host does not wait for.
- The same around an inference pass. After one, :meth:`WeightCache.distrust` has all copies written again.

A write through ``.data`` that changes only a few elements may miss the sample: :meth:`WeightCache.invalidate` is for
that.

Weights of FSDP have no copy: each rank would hold copies of all of them, which sharding is there to avoid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, Iterable, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fp8_compile.kernels.cpu.fingerprint import Fingerprints
from fp8_compile.kernels.cpu.quantize import quantize_delayed_op
from fp8_compile.kernels.delayed_scaling import DEQUANT, QUANT, cast_delayed, first_scale
from fp8_compile.kernels.formats import E4M3, E5M2
from fp8_compile.kernels.quantize import WHOLE, block_amax
from fp8_compile.kernels.record_amax import record_amax
from fp8_compile.passes.graph.slot import Place, Slot
from fp8_compile.torch_internals.autograd import version
from fp8_compile.torch_internals.graphs import is_fake, real_tensors
from fp8_compile.torch_internals.modules import local_part as local

if TYPE_CHECKING:
    from fp8_compile.kernels.gpu.quantize_many import Matrix, QuantizeMany

    from .state import ScalingState
    from .weight_sampler import Sampler


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
    written: bool = False  # by someone who left its version as it was
    looked: bool = False  # made with the weight's own scale, because someone else than an optimizer had replaced it
    epoch: int = -1  # of the state, when the copy was made: replaced histories give other scales
    primed: int = -1  # the epoch in which the slot was found to have a history
    fingerprint: int | None = None  # of the weight, when the copy was made on a CPU
    fingerprints: Tensor | None = None  # on a GPU: where the kernel keeps it, once for each tile

    def is_stale(self, weight: Tensor, epoch: int) -> bool:
        if self.marked or self.written or self.epoch != epoch or self.seen is None or self.current() is not weight:
            return True
        memory, *versions = self.seen
        now = local(weight)
        return now.data_ptr() != memory.data_ptr() or versions != [version(weight), version(now)]

    def is_replaced(self, epoch: int) -> bool:
        """Of a stale copy: whether its weight was written by someone else than an optimizer, and may be of any size."""
        return self.written or (not self.marked and self.seen is not None and self.epoch == epoch)

    def made_from(self, weight: Tensor, epoch: int) -> None:
        now = local(weight).detach()
        self.marked, self.written, self.epoch, self.weight = False, False, epoch, weakref.ref(weight)
        self.seen = now, version(weight), version(local(weight))

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
        self._distrusted = False
        self._fingerprints = Fingerprints()
        self._launches: QuantizeMany | None = None
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
        """These weights, or all of them, have changed: have them quantized again before they are next read. Needed for
        writes through ``.data`` to a few elements alone, which the samples of a weight may miss."""
        chosen = None if weights is None else {id(weight) for weight in weights}
        for entry in self.copies():
            entry.marked |= chosen is None or id(entry.current()) in chosen

    def stepped(self, weights: Iterable[Tensor]) -> None:
        """An optimizer has written these weights. What it left is noted, to tell it from what others write later."""
        self.invalidate(weights)
        pairs = {entry: weight for entry in self.copies() if entry.marked and (weight := entry.current()) is not None}
        self._take_fingerprints(_by_device(pairs)[0])

    def distrust(self) -> None:
        """All weights may have changed: have them quantized again before the next training forward, whatever version
        counters and fingerprints say. For after each inference pass, around which weights are swapped for their
        averages and back; it costs nothing here.

        A weight that is seen to be the same gets the copy that it had, so that a backward is not refused because an
        inference pass was run between it and its forward."""
        self._distrusted = True

    def copies(self) -> list[CachedWeight]:
        """Every copy that a graph reads."""
        return [entry for entry in (one() for one in self._read) if entry is not None]

    @property
    def entries(self) -> dict[Slot, CachedWeight]:
        """The copies by slot."""
        return {entry.slot: entry for entry in self.copies() if entry.slot is not None}

    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self.copies() for tensor in entry.tensors())

    def ensure_fresh(self, weights: Mapping[CachedWeight, Tensor], sampler: Sampler) -> None:
        """Before a training graph that reads these copies of these weights runs: if one is stale, renew all that are,
        those of other graphs too. ``sampler`` is the graph's own."""
        epoch = self.state.epoch
        fresh = {entry: weight for entry, weight in weights.items() if not entry.is_stale(weight, epoch)}
        on_cpu, on_gpu = _by_device(fresh)
        marked, _ = _by_device({entry: weight for entry, weight in weights.items() if entry.marked})
        written = [*sampler.written(on_cpu), *sampler.written(marked)]
        if self._distrusted:
            written = [*written, *self._written_elsewhere(besides=weights)]
        for entry in written:
            entry.written = True
        with torch.no_grad():
            stale = self._stale(weights) if written or len(fresh) < len(weights) else {}
            if stale:
                self._refresh(stale)
            if self._distrusted:
                self._distrusted = False
                self._write_again(besides=stale)
            elif on_gpu:  # without those that were just refreshed, which after an optimizer's step are all
                sampler.renew_written(on_gpu)

    def _stale(self, weights: Mapping[CachedWeight, Tensor]) -> dict[CachedWeight, Tensor]:
        """Every copy of the model that is, with its weight: the one in ``weights`` if it is there."""
        others = {entry: entry.current() for entry in self.copies()}
        pairs = {entry: weight for entry, weight in {**others, **weights}.items() if weight is not None}
        return {entry: weight for entry, weight in pairs.items() if entry.is_stale(weight, self.state.epoch)}

    def _written_elsewhere(self, besides: Mapping[CachedWeight, Tensor]) -> list[CachedWeight]:
        """Copies that other graphs read, on the CPU, whose weight has another fingerprint now."""
        pairs = {entry: weight for entry in self.copies() if (weight := entry.current()) is not None}
        on_cpu, _ = _by_device({entry: weight for entry, weight in pairs.items() if entry not in besides})
        found = self._fingerprints([local(weight) for weight in on_cpu.values()])
        return [entry for entry, one in zip(on_cpu, found) if entry.fingerprint not in (None, one)]

    def _refresh(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        pages = sorted({entry.place.page for entry in stale})  # type: ignore[union-attr]
        for page in pages:
            self.state.settle_page(page)  # what the pass that begins would do first
        for entry in stale:
            self._look(entry, entry.is_replaced(self.state.epoch))
        on_cpu, on_gpu = _by_device(stale)
        self._quantize_on_cpu(on_cpu)
        if on_gpu:
            self._quantize_on_gpu(on_gpu)
        for entry, weight in stale.items():
            increment_version(entry.tensors())  # a backward to come must not read what its forward did not
            entry.made_from(weight, self.state.epoch)
        self.refreshes += 1

    def _look(self, entry: CachedWeight, on: bool) -> None:
        """Have a weight quantized by its own amax, or by its history again. The state is told: otherwise it would
        compare the amax with a scale that was not used."""
        assert entry.place is not None
        if entry.looked != on:
            entry.looked = on
            self.state.pages[entry.place.page].look([entry.place.row], on)

    def _write_again(self, besides: Mapping[CachedWeight, Tensor]) -> None:
        """Quantize weights that nothing is known against, by the scales that their copies have. Histories are left
        alone, and so are versions: copies of weights that are indeed the same are written with the same bytes."""
        pairs = {entry: entry.current() for entry in self.copies() if entry not in besides}
        epoch = self.state.epoch
        fresh = {entry: w for entry, w in pairs.items() if w is not None and not entry.is_stale(w, epoch)}
        on_cpu, on_gpu = _by_device(fresh)
        self._take_fingerprints(on_cpu)
        for entry, weight in on_cpu.items():
            place = entry.place
            assert place is not None
            self._write(entry, local(weight), self.known[place.page][QUANT, place.row])
        if on_gpu:
            self._launch(on_gpu, record=False)
        self.refreshes += bool(fresh)

    def _take_fingerprints(self, weights: Mapping[CachedWeight, Tensor]) -> None:
        """Before they are quantized: what another thread writes after that is found at the next look."""
        found = self._fingerprints([local(weight) for weight in weights.values()])
        for entry, fingerprint in zip(weights, found):
            entry.fingerprint = fingerprint

    def _quantize_on_cpu(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        self._take_fingerprints(stale)
        for entry, weight in stale.items():
            place = entry.place
            assert place is not None
            page = self.state.pages[place.page]
            scale = torch.zeros(()) if entry.looked else page.scales[QUANT, place.row]
            used, dequant_scale, amax = self._write(entry, local(weight), scale)
            self._set_known(place, used.view(()), dequant_scale.view(()))
            record_amax(page.amaxes, amax, place.row)

    def _write(self, entry: CachedWeight, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize by a scale, 0 where there is none yet: the scale that was used, its inverse, the amax."""
        page = self.state.pages[entry.place.page]  # type: ignore[union-attr]
        x = weight if entry.via is None else weight.to(entry.via)
        scale, dtype = scale.view(1, 1), entry.codes.dtype
        if dtype in (E4M3.dtype, E5M2.dtype):
            codes, used, dequant_scale, amax = quantize_delayed_op(x, scale, dtype, True)
        else:
            amax = block_amax(x, (WHOLE, WHOLE))
            used = first_scale(scale, amax, page.kind.largest)
            codes, dequant_scale = cast_delayed(x, used, dtype), used.reciprocal()
        # Through .data: the caller knows whether version counters are to go up.
        entry.codes.data.view(torch.uint8).copy_(codes.view(torch.uint8))
        if entry.transposed is not None:
            entry.transposed.data.view(torch.uint8).copy_(codes.view(torch.uint8).t())
        return used, dequant_scale, amax

    def _quantize_on_gpu(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        self._set_scales(stale)
        self._launch(stale, record=True)

    def _launch(self, weights: Mapping[CachedWeight, Tensor], *, record: bool) -> None:
        from fp8_compile.kernels.gpu.quantize_many import launches_for

        # After a step it is the same weights at the same addresses as after the step before.
        self._launches = launches_for(self.matrices(weights), self._launches)
        self._launches(record=record)

    def matrices(self, weights: Mapping[CachedWeight, Tensor]) -> list[Matrix]:
        """Weights on a GPU and their copies, as the kernel is told of them."""
        from fp8_compile.kernels.gpu.quantize_many import Matrix, new_fingerprints

        found = []
        for entry, weight in weights.items():
            place, x = entry.place, local(weight).detach()
            assert place is not None
            if entry.fingerprints is None:
                entry.fingerprints = new_fingerprints(x)
            scale, amax = self.known[place.page][QUANT, place.row], self.state.pages[place.page].amaxes[place.row]
            found.append(Matrix(x, entry.codes, entry.transposed, scale, amax, entry.fingerprints, entry.via))
        return found

    def _set_scales(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        """The scales to quantize with; of a slot without history, or a weight that was replaced, from the weight."""
        by_page: dict[int, list[int]] = {}
        for entry in stale:
            by_page.setdefault(entry.place.page, []).append(entry.place.row)  # type: ignore[union-attr]
        for index, rows in by_page.items():
            scales, at = self.state.pages[index].scales, self._on_device(index, rows)
            self.known[index].data.index_copy_(1, at, scales.index_select(1, at))
        for entry in stale:
            page, row = self.state.pages[entry.place.page], entry.place.row  # type: ignore[union-attr]
            if not entry.looked:
                if entry.primed == self.state.epoch:
                    continue
                if float(page.scales[QUANT, row]) > 0:  # waits for the device, on the first steps alone
                    entry.primed = self.state.epoch
                    continue
            weight = local(stale[entry])
            amax = block_amax(weight if entry.via is None else weight.to(entry.via), (WHOLE, WHOLE)).view(())
            used = first_scale(torch.zeros_like(amax), amax, page.kind.largest)
            assert entry.place is not None
            self._set_known(entry.place, used, used.reciprocal())

    def _set_known(self, place: Place, quant_scale: Tensor, dequant_scale: Tensor) -> None:
        """Through .data: a backward that reads this scale reads the copy too, whose version tells whether it is still
        the one of its forward. A version for all scales of the page would refuse backwards of other weights."""
        known = self.known[place.page].data
        known[QUANT, place.row], known[DEQUANT, place.row] = quant_scale, dequant_scale

    def _on_device(self, page: int, rows: list[int]) -> Tensor:
        """Rows of a page as an index. A list of numbers would be copied to the device anew each step, which waits for
        all that the device has to do and can't be captured in a CUDA graph."""
        if page not in self._rows or self._rows[page][0] != rows:
            self._rows[page] = rows, torch.tensor(rows, device=self.known[page].device)
        return self._rows[page][1]


_caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()


def mark_stepped(optimizer: Optimizer) -> None:
    """Fused optimizers write to weights without raising their version counters (torch 2.13); so may others."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    for cache in list(_caches):
        cache.stepped(weights)


register_optimizer_step_post_hook(lambda optimizer, args, kwargs: mark_stepped(optimizer))


def _by_device(
    weights: Mapping[CachedWeight, Tensor],
) -> tuple[dict[CachedWeight, Tensor], dict[CachedWeight, Tensor]]:
    """Those on the CPU and those on a GPU."""
    on_cpu: dict[CachedWeight, Tensor] = {}
    on_gpu: dict[CachedWeight, Tensor] = {}
    for entry, weight in weights.items():
        (on_cpu if local(weight).is_cpu else on_gpu)[entry] = weight
    return on_cpu, on_gpu


def _real_unless_fake(like: Tensor) -> Any:
    """Where tensors are fake, those of a fake model are meant to be; others not."""
    return contextlib.nullcontext() if is_fake(like) else real_tensors()
