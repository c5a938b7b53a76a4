"""A loss scale that follows the gradients: ``torch.amp.GradScaler`` with a floor, a count and a plain state."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import Tensor

from fp8_compile.torch_internals.autograd import accelerator

INIT_SCALE = 2.0**16
GROWTH_INTERVAL = 2000
FLOOR = 1.0


class LossScaler(torch.amp.GradScaler):
    """Scale the loss by hand, as with ``torch.amp.GradScaler``; :func:`fp8_compile.attach` does it inside the graphs.

        scaler.scale(loss).backward()
        scaler.step(optimizer)          # skipped if a gradient is not finite
        scaler.update()                 # then scale /= 2, at least ``floor``; else, every growth_interval-th time, *= 2

    ``skipped_steps`` counts. No gradient is ever zeroed or clamped to make it finite.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = INIT_SCALE,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = GROWTH_INTERVAL,
        floor: float = FLOOR,
        enabled: bool = True,
    ) -> None:
        if not 0 < floor <= init_scale < float("inf"):
            raise ValueError(f"expected 0 < floor <= init_scale, both finite, got {floor=}, {init_scale=}")
        if growth_factor <= 1 or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                "expected growth_factor > 1, 0 < backoff_factor < 1 and growth_interval >= 1, got "
                f"{growth_factor}, {backoff_factor} and {growth_interval}"
            )
        device = device or accelerator()
        super().__init__(device, float(init_scale), growth_factor, backoff_factor, growth_interval, enabled)
        self.floor = float(floor)
        self._skipped = 0
        self._skipped_since: Tensor | None = None  # on the device, not yet waited for

    @property
    def skipped_steps(self) -> int:
        """How many updates followed a gradient that was not finite. Waits for the device."""
        if self._skipped_since is not None:
            self._skipped, self._skipped_since = self._skipped + int(self._skipped_since), None
        return self._skipped

    def prepare(self, device: torch.device) -> None:
        """Put the scale on a device before the first :meth:`scale` would."""
        if self._enabled and self._scale is None:
            self._lazy_init_scale_growth_tracker(device)

    def note(self, optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
        """Say what was found in an optimizer's gradients, for the next :meth:`update`, where it was found elsewhere."""
        self.prepare(found_inf.device)
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {found_inf.device: found_inf}

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Halve, double or keep the scale by what the optimizers found since the last update. Waits for nothing."""
        if not self._enabled:
            return
        states = self._per_optimizer_states.values()
        found = [found for state in states for found in state["found_inf_per_device"].values()]
        super().update(new_scale)
        assert self._scale is not None
        self._scale.clamp_(min=self.floor)
        if found and new_scale is None:
            bad = (torch.stack([one.to(self._scale.device).reshape(()) for one in found]).amax() > 0).to(torch.int64)
            self._skipped_since = bad if self._skipped_since is None else self._skipped_since + bad

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        if not self._enabled:
            return {}
        return {**super().state_dict(), "floor": self.floor, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a saved state over; that of a plain ``GradScaler`` will do."""
        if not self._enabled:
            return
        super().load_state_dict(dict(state_dict))
        self.floor = float(state_dict.get("floor", self.floor))
        self._skipped, self._skipped_since = int(state_dict.get("skipped_steps", 0)), None
