"""The scaling state of a model as it was after the last step, for a step that has to be undone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .passes.slot import FIELDS
from .scaling_page import Page
from .scaling_state import ScalingState, states_within


class KeptHistories:
    """Copies of all amax histories and scales: some kilobytes, copied by multi-tensor kernels."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._kept: dict[Page, list[Tensor]] = {}

    def states(self) -> list[ScalingState]:
        return list(states_within(self.model).values())

    def keep(self) -> None:
        for page in self._pages():
            tensors = _tensors(page)
            kept = self._kept.setdefault(page, [torch.empty_like(tensor) for tensor in tensors])
            torch._foreach_copy_(kept, tensors)

    def restore(self) -> None:
        """Every page as it was when it was kept; one that was not there yet, as if no pass had been."""
        for page in self._pages():
            if page in self._kept:
                torch._foreach_copy_(_tensors(page), self._kept[page])
            else:
                page.clear()
        for state in self.states():
            state.epoch += 1  # histories that were there may be gone

    def _pages(self) -> list[Page]:
        return [page for state in self.states() for page in state.pages]


def _tensors(page: Page) -> list[Tensor]:
    return [getattr(page, field).data for field in FIELDS]
