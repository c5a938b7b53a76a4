"""The scaling state of a model as it was after the last step, for a step that has to be undone."""

from __future__ import annotations

from torch import nn

from .find_state import states_within
from .state import ScalingState
from .table import Page


class KeptHistories:
    """Copies of all amax histories and scales: some kilobytes, copied by multi-tensor kernels."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def states(self) -> list[ScalingState]:
        return list(states_within(self.model).values())

    def keep(self) -> None:
        for page in self._pages():
            page.keep()

    def restore(self) -> None:
        """Every page as it was when it was kept; one that was not there yet, as if no pass had been."""
        for page in self._pages():
            page.restore()
        for state in self.states():
            state.epoch += 1  # histories that were there may be gone

    def _pages(self) -> list[Page]:
        return [page for state in self.states() for page in state.pages]
