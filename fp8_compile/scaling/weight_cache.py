"""FP8 copies of a model's weights, made once per optimizer step and read by every training run until the next.

    copy: q = fp8(w * quant_scale), and its transpose for GPUs that want K contiguous; quant_scale from the history of
          the weight's slot

A copy is as new as its weight. Before a training forward reads it, the weight's identity, address and version counters
are compared with those it was made from, and all weights of the model that changed are quantized in one launch. Three
things write to a weight without its version counters knowing:

- Fused optimizers. Each ``step()`` of any optimizer marks what it has in its groups.
- Writes through ``.data``, as most classes that average weights do them (EMA). A fingerprint of a sample of the weight
  (``kernels/fingerprint.py``) is compared as well: by the host for weights on a CPU; on a GPU by the kernel that
  quantizes, which the host does not wait for.
- The same around an inference run. After one, :meth:`WeightCache.distrust` has all copies written again.

A write through ``.data`` that changes only a few elements may miss the sample: :meth:`WeightCache.invalidate` is for
that.

Weights of FSDP have no copy: each rank would hold copies of all of them, which sharding is there to avoid.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Iterable, Mapping

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fp8_compile.kernels.cpu.fingerprint import Fingerprints
from fp8_compile.kernels.delayed_scaling import QUANT
from fp8_compile.passes.graph.slot import Place, Slot, TensorUse
from fp8_compile.torch_internals.modules import local_part

from .cached_weight import CachedWeight
from .table import Table, TableKind
from .weight_writer import WeightWriter

if TYPE_CHECKING:
    from .state import ScalingState
    from .weight_sampler import Sampler

TABLE_ROWS = 64  # of a table of weights


@dataclasses.dataclass(frozen=True)
class CopyForm:
    """What a copy is like: its dtype, with its transpose or not, what the weight is rounded to first, how its scale
    follows from its history."""

    dtype: torch.dtype
    transposed: bool
    via: torch.dtype | None
    kind: TableKind


class WeightCache:
    """The copies of one model: ``ScalingState.weights``, while an optimizer is attached."""

    def __init__(self, state: ScalingState) -> None:
        self.state, self.writer = state, WeightWriter(state)
        self.refreshes = 0
        self.changes = 0  # goes up when a copy may have become stale, or was renewed
        self._tables: list[int] = []  # of the state: the slots of weights that have copies
        self._copies: list[weakref.ref[CachedWeight]] = []
        self._distrusted = False
        self._fingerprints = Fingerprints()
        _caches.add(self)

    def entry(self, weight: Tensor, use: TensorUse, frame: str, form: CopyForm) -> CachedWeight:
        """The copy of a weight in some form, a new one if there is none. A weight that two models have in common has
        one copy, which belongs to the model that asked first."""
        forms = _by_weight.setdefault(weight, {})
        if form not in forms:
            local, slot = local_part(weight), self.state.slot_of(use, frame)
            at = self._row(slot, form.kind)
            self.state.occupy(slot, use, at)
            rows, cols = local.shape
            codes = torch.empty(rows, cols, dtype=form.dtype, device=local.device)
            turned = torch.empty(cols, rows, dtype=form.dtype, device=local.device) if form.transposed else None
            scales = torch.zeros(2, dtype=torch.float32, device=local.device)
            forms[form] = CachedWeight(self, slot, at, codes, turned, scales, weakref.ref(weight), form.via)
            self._copies = [weakref.ref(entry) for entry in (*self.copies(), forms[form])]
        return forms[form]

    def _row(self, slot: Slot, kind: TableKind) -> Place:
        """Where the slot of a new copy is to be: where it was if the copy of another weight, which is gone, had it."""
        taken = {entry.at for entry in self.copies()}
        before = self.state.place_of(slot)
        if before is not None and before.table in self._tables and before not in taken:
            return before
        tables = [index for index in self._tables if self.state.tables[index].kind == kind]
        places = (Place(index, row) for index in tables for row in range(self.state.tables[index].capacity))
        free = next((place for place in places if place not in taken), None)
        if free is None:
            free = Place(self.state.add_table(kind, TABLE_ROWS), 0)
            self._tables.append(free.table)
        return free

    def invalidate(self, weights: Iterable[Tensor] | None = None) -> None:
        """These weights, or all of them, have changed: have them quantized again before they are next read. Needed for
        writes through ``.data`` to a few elements alone, which the samples of a weight may miss."""
        self.changes += 1
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
        counters and fingerprints say. For after each inference run, around which weights are swapped for their
        averages and back; it costs nothing here.

        A weight that is seen to be the same gets the copy that it had, so that a backward is not refused because an
        inference was run between it and its forward."""
        self._distrusted = True
        self.changes += 1

    def copies(self) -> list[CachedWeight]:
        """Every copy that this cache renews."""
        return [entry for entry in (one() for one in self._copies) if entry is not None]

    @property
    def tables(self) -> list[Table]:
        """Those of the state that have the slots of weights with copies."""
        return [self.state.tables[index] for index in self._tables]

    @property
    def entries(self) -> dict[Slot, CachedWeight]:
        """The copies by slot."""
        return {entry.slot: entry for entry in self.copies()}

    def scales(self) -> dict[Slot, Tensor]:
        """The quant_scales of the copies that are as new as their weights."""
        pairs = [(copy, weight) for copy in self.copies() if (weight := copy.current()) is not None]
        return {copy.slot: copy.scales[QUANT].clone() for copy, w in pairs if not copy.is_stale(w, self.state.epoch)}

    def memory_bytes(self) -> int:
        return sum(tensor.nbytes for entry in self.copies() for tensor in entry.tensors())

    def ensure_fresh(self, weights: Mapping[CachedWeight, Tensor], sampler: Sampler) -> None:
        """Before a training graph that reads these copies of these weights runs: if one is stale, renew all that are,
        those of other graphs too. ``sampler`` is the graph's own."""
        epoch = self.state.epoch
        fresh = {entry: weight for entry, weight in weights.items() if not entry.is_stale(weight, epoch)}
        on_cpu, on_gpu = _by_device(fresh)
        written = sampler.written(on_cpu)
        if len(fresh) < len(weights):
            marked, _ = _by_device({entry: weight for entry, weight in weights.items() if entry.marked})
            written += sampler.written(marked)
        if self._distrusted or written:  # who wrote these may have written those of other graphs, refreshed below too
            written = [*written, *self._written_elsewhere(besides=weights)]
        self.changes += bool(written)
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
        found = self._fingerprints([local_part(weight) for weight in on_cpu.values()])
        return [entry for entry, one in zip(on_cpu, found) if entry.fingerprint not in (None, one)]

    def _refresh(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        for table in sorted({entry.at.table for entry in stale}):
            self.state.settle_table(table)  # what the run that begins would do first
        for entry in stale:
            self._look(entry, entry.is_replaced(self.state.epoch))
        on_cpu, on_gpu = _by_device(stale)
        self._take_fingerprints(on_cpu)
        self.writer.quantize_on_cpu(on_cpu)
        if on_gpu:
            self.writer.quantize_on_gpu(on_gpu)
        for entry, weight in stale.items():
            increment_version(entry.tensors())  # a backward to come must not read what its forward did not
            entry.made_from(weight, self.state.epoch)
        self.refreshes += 1
        self.changes += 1

    def _look(self, entry: CachedWeight, on: bool) -> None:
        """Have a weight quantized by its own amax, or by its history again. The state is told: otherwise it would
        compare the amax with a scale that was not used."""
        if entry.looked != on:
            entry.looked = on
            self.state.tables[entry.at.table].look([entry.at.row], on)

    def _write_again(self, besides: Mapping[CachedWeight, Tensor]) -> None:
        """Quantize weights that nothing is known against, by the scales that their copies have. Histories are left
        alone, and so are versions: copies of weights that are indeed the same are written with the same bytes."""
        pairs = {entry: entry.current() for entry in self.copies() if entry not in besides}
        epoch = self.state.epoch
        fresh = {entry: w for entry, w in pairs.items() if w is not None and not entry.is_stale(w, epoch)}
        on_cpu, on_gpu = _by_device(fresh)
        self._take_fingerprints(on_cpu)
        for entry, weight in on_cpu.items():
            self.writer.write(entry, local_part(weight), entry.scales[QUANT])
        if on_gpu:
            self.writer.launch(on_gpu, record=False)
        self.refreshes += bool(fresh)

    def _take_fingerprints(self, weights: Mapping[CachedWeight, Tensor]) -> None:
        """Before they are quantized: what another thread writes after that is found at the next look."""
        found = self._fingerprints([local_part(weight) for weight in weights.values()])
        for entry, fingerprint in zip(weights, found):
            entry.fingerprint = fingerprint


def caches_of(weights: Iterable[Tensor]) -> set[WeightCache]:
    """Those that have copies of these weights."""
    return {entry.cache for weight in weights if weight in _by_weight for entry in _by_weight[weight].values()}


_caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()
_by_weight: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weight -> {form: copy}


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
        (on_cpu if local_part(weight).is_cpu else on_gpu)[entry] = weight
    return on_cpu, on_gpu
