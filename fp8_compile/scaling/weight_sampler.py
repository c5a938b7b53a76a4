"""Find out by a sample of each weight whether someone has written to it without raising its version counter.

This happens before every training forward of a graph, so what it needs is prepared once and kept with the graph. The
samples and what is made of them: ``kernels/fingerprint.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from torch import Tensor

from fp8_compile.kernels.cpu.fingerprint import Fingerprints
from fp8_compile.torch_internals.modules import local_part

from .cached_weight import CachedWeight

if TYPE_CHECKING:
    from fp8_compile.kernels.gpu.quantize_many import QuantizeMany

    from .weight_cache import WeightCache


class Sampler:
    """For the weights that one graph reads."""

    def __init__(self, cache: WeightCache) -> None:
        self.cache = cache
        self._fingerprints = Fingerprints()
        self._launches: QuantizeMany | None = None
        self._prepared_for: tuple[Any, ...] = ()

    def written(self, weights: Mapping[CachedWeight, Tensor]) -> list[CachedWeight]:
        """The copies, on the CPU, whose weight no longer has the fingerprint that it had when they were made."""
        found = self._fingerprints([local_part(weight) for weight in weights.values()])
        return [entry for entry, now in zip(weights, found) if entry.fingerprint not in (None, now)]

    def renew_written(self, weights: Mapping[CachedWeight, Tensor]) -> None:
        """The same for weights on a GPU, and renew the copies, by the scales that they have: one launch that the host
        does not wait for. So it does not learn what was found, and versions stay as they are."""
        from fp8_compile.kernels.gpu.quantize_many import launches_for

        # Weights that are fresh are where they were at the last refresh. Only after another one is it worth a look.
        wanted = (self.cache.refreshes, *weights)
        if self._launches is None or self._prepared_for != wanted:
            matrices = self.cache.writer.matrices(weights)
            self._launches, self._prepared_for = launches_for(matrices, self._launches), wanted
        self._launches(check=True)
