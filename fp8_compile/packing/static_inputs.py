"""Packed weights whose inputs may have a static scale, a buffer beside the weight's own parts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp8_compile.kernels.fp8_weight import FP8Weight

from .packed_weight import PackedWeight


class StaticInputs(PackedWeight):
    """``input_scale`` is fp32 [], what inputs are divided by, or None where they have scales of their own."""

    activations: str | None = None
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


class FP8Parts(StaticInputs):
    """FP8 of one matrix, or of a stack of them: codes e4m3 [..., N, K], scales fp32 [..., N].

    ``activations="fp8"``: inputs are rounded to E4M3 too, by ``input_scale`` (a calibration's amax / 448), or where
    that is None each row by its own amax.
    """

    packed, matrix_type = ("codes", "scales"), FP8Weight
    codes: Tensor
    scales: Tensor

    @property
    def static_inputs(self) -> bool | None:
        """True where inputs are rounded by a static scale, False by one per row, None where they are exact."""
        return None if self.activations is None else self.input_scale is not None

    @property
    def inputs(self) -> str:
        """What reports say about the rounding of inputs."""
        words = {None: "", True: "inputs e4m3, static scale", False: "inputs e4m3, dynamic scale a row"}
        return words[self.static_inputs]
