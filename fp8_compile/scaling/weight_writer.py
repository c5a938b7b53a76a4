"""Quantize weights into their FP8 copies: one after the other on a CPU, many in one launch on a GPU.

    q     = fp8(w * quant_scale)      into the copy, and transposed into its transpose where there is one
    amax  = max |w|                   recorded in the weight's slot

``quant_scale`` comes from the history of the weight's slot; for a slot without a history, and for a weight that was
replaced, from the weight itself. What was used is kept for the graphs that read the copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Mapping

import torch
from torch import Tensor

from fp8_compile.kernels.cpu.quantize import quantize_delayed_op
from fp8_compile.kernels.delayed_scaling import DEQUANT, QUANT, cast_delayed, first_scale
from fp8_compile.kernels.formats import E4M3, E5M2
from fp8_compile.kernels.quantize import WHOLE, block_amax
from fp8_compile.kernels.record_amax import record_amax
from fp8_compile.torch_internals.autograd import copy_all
from fp8_compile.torch_internals.modules import local_part

from .cached_weight import CachedWeight

if TYPE_CHECKING:
    from fp8_compile.kernels.gpu.quantize_many import Matrix, QuantizeMany

    from .state import ScalingState


class WeightWriter:
    """Writes the copies of one model."""

    def __init__(self, state: ScalingState) -> None:
        self.state = state
        self._launches: QuantizeMany | None = None
        self._rows: dict[int, tuple[list[int], Tensor]] = {}  # by table: which were renewed last, there on the device

    def quantize_on_cpu(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        for entry, weight in stale.items():
            table = self.state.tables[entry.at.table]
            scale = torch.zeros(()) if entry.looked else table.scales[QUANT, entry.at.row]
            used, dequant_scale, amax = self.write(entry, local_part(weight), scale)
            _set_scales(entry, used.view(()), dequant_scale.view(()))
            record_amax(table.amaxes, amax, entry.at.row)

    def write(self, entry: CachedWeight, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize by a scale, 0 where there is none yet: the scale that was used, its inverse, the amax."""
        table = self.state.tables[entry.at.table]
        x = weight if entry.via is None else weight.to(entry.via)
        scale, dtype = scale.view(1, 1), entry.codes.dtype
        if dtype in (E4M3.dtype, E5M2.dtype):
            codes, used, dequant_scale, amax = quantize_delayed_op(x, scale, dtype, True)
        else:
            amax = block_amax(x, (WHOLE, WHOLE))
            used = first_scale(scale, amax, table.kind.largest)
            codes, dequant_scale = cast_delayed(x, used, dtype), used.reciprocal()
        # Through .data: the caller knows whether version counters are to go up.
        entry.codes.data.view(torch.uint8).copy_(codes.view(torch.uint8))
        if entry.transposed is not None:
            entry.transposed.data.view(torch.uint8).copy_(codes.view(torch.uint8).t())
        return used, dequant_scale, amax

    def quantize_on_gpu(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        self.set_scales(stale)
        self.launch(stale, record=True)

    def launch(self, weights: Mapping[CachedWeight, Tensor], *, record: bool) -> None:
        from fp8_compile.kernels.gpu.quantize_many import launches_for

        # After a step it is the same weights at the same addresses as after the step before.
        self._launches = launches_for(self.matrices(weights), self._launches)
        self._launches(record=record)

    def matrices(self, weights: Mapping[CachedWeight, Tensor]) -> list[Matrix]:
        """Weights on a GPU and their copies, as the kernel is told of them."""
        from fp8_compile.kernels.gpu.quantize_many import Matrix, new_fingerprints

        found = []
        for entry, weight in weights.items():
            x = local_part(weight).detach()
            if entry.fingerprints is None:
                entry.fingerprints = new_fingerprints(x)
            scale, amax = entry.scales[QUANT], self.state.tables[entry.at.table].amaxes[entry.at.row]
            found.append(Matrix(x, entry.codes, entry.transposed, scale, amax, entry.fingerprints, entry.via))
        return found

    def set_scales(self, stale: Mapping[CachedWeight, Tensor]) -> None:
        """The scales to quantize with; of a slot without history, or a weight that was replaced, from the weight."""
        by_table: dict[int, list[CachedWeight]] = {}
        for entry in stale:
            by_table.setdefault(entry.at.table, []).append(entry)
        for index, entries in by_table.items():
            scales, at = self.state.tables[index].scales, self._on_device(index, [entry.at.row for entry in entries])
            now = scales.index_select(1, at).unbind(1)
            copy_all([entry.scales.data for entry in entries], now)
        for entry in stale:
            table, row = self.state.tables[entry.at.table], entry.at.row
            if not entry.looked:
                if entry.primed == self.state.epoch:
                    continue
                if float(table.scales[QUANT, row]) > 0:  # waits for the device, on the first steps alone
                    entry.primed = self.state.epoch
                    continue
            weight = local_part(stale[entry])
            amax = block_amax(weight if entry.via is None else weight.to(entry.via), (WHOLE, WHOLE)).view(())
            used = first_scale(torch.zeros_like(amax), amax, table.kind.largest)
            _set_scales(entry, used, used.reciprocal())

    def _on_device(self, table: int, rows: list[int]) -> Tensor:
        """Rows of a table as an index. A list of numbers would be copied to the device in each step, which waits for
        all that the device has to do and can't be captured in a CUDA graph."""
        if table not in self._rows or self._rows[table][0] != rows:
            self._rows[table] = rows, torch.tensor(rows, device=self.state.tables[table].scales.device)
        return self._rows[table][1]


def _set_scales(entry: CachedWeight, quant_scale: Tensor, dequant_scale: Tensor) -> None:
    """Through .data: a backward that reads this scale reads the copy too, whose version tells whether it is still the
    one of its forward."""
    entry.scales.data[QUANT], entry.scales.data[DEQUANT] = quant_scale, dequant_scale
