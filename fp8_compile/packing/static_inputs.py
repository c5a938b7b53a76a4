"""Packed weights whose inputs may have a static scale, a buffer beside the weight's own parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .packed_weight import PackedWeight


class StaticInputs(PackedWeight):
    """``input_scale`` is fp32 [], what inputs are divided by, or None where they have scales of their own."""

    input_scale: Tensor | None

    def use_activations(self, activations: str | None, input_scale: Tensor | None = None) -> None:
        """Say how inputs are rounded."""
        self.activations = activations
        self.register_buffer("input_scale", input_scale)
        self.packed = (*type(self).packed, *(() if input_scale is None else ("input_scale",)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if self.input_scale is not None and f"{prefix}input_scale" in state_dict:
            self.input_scale = self.input_scale.clone()  # what is loaded need not be what siblings get
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
