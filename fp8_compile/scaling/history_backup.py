"""The scaling state of a model as it was after the last step, for a step that has to be undone."""

from __future__ import annotations

from torch import nn

from .find_state import states_within
from .state import ScalingState
from .table import Table
from .weight_cache import caches_of


class HistoryBackup:
    """Copies of all amax histories and scales: some kilobytes, copied by multi-tensor kernels."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def states(self) -> list[ScalingState]:
        return list(states_within(self.model).values())

    def keep(self) -> None:
        for table in self._tables():
            table.keep()

    def restore(self) -> None:
        """Every table as it was when it was kept; one that was not there yet, as if no run had been."""
        for table in self._tables():
            table.restore()
        for state in self.states():
            state.epoch += 1  # histories that were there may be gone

    def _tables(self) -> list[Table]:
        """Also those of weights that another model has in common with this one, whose state has their slots."""
        own = {id(table): table for state in self.states() for table in state.tables}
        shared = {id(table): table for cache in caches_of(self.model.parameters()) for table in cache.tables}
        return list((own | shared).values())
