"""Static scales of layers' inputs, from a calibration.

    FP8:     scale = amax / 448          an fp32 scalar: x / scale reaches E4M3's largest value where x reaches the amax
    NVFP4:   scale = amax / (448 * 6)    what servers divide by before each block gets its own scale
"""

from __future__ import annotations

from typing import Iterable, Mapping

import torch
from torch import Tensor

from fp8_compile.kernels.formats import E4M3
from fp8_compile.kernels.nvfp4.weight import NEAREST_RANGE, global_scale_of

from .calibration import Calibration
from .linear_layers import fused_groups


def static_scales(names: Iterable[str], calibration: Calibration) -> dict[str, Tensor]:
    """The scale of each layer's input; layers whose inputs were all zeros have none."""
    names = list(names)
    check_seen(names, calibration)
    amaxes = {name: calibration.amax(name) for name in names}
    return shared_scales({name: (amax / E4M3.max).clamp(min=_SMALLEST) for name, amax in amaxes.items() if amax > 0})


def global_scales(layers: Iterable[str], stacks: Iterable[str], calibration: Calibration) -> dict[str, Tensor]:
    """The global scale of the inputs of NVFP4 layers and of stacks of experts. Layers that servers fuse have the same,
    and so have all experts of a stack: no batch need have reached each of them."""
    layers = list(layers)
    check_seen(layers, calibration)
    amaxes = {name: calibration.amax(name) for name in layers}
    for group in fused_groups(layers):
        amaxes |= dict.fromkeys(group, torch.stack([amaxes[name] for name in group]).amax())
    for stack in stacks:
        seen = [name for name in calibration.names if name.rpartition(".")[0] == stack]
        check_seen([] if seen else [stack], calibration)
        amaxes[stack] = torch.stack([calibration.amax(name) for name in seen]).amax()
    return {name: global_scale_of(amax, NEAREST_RANGE) for name, amax in amaxes.items()}


def shared_scales(scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same scales, with one tensor for siblings whose scales are equal (q, k and v): by it the compiler sees that
    their input has to be quantized only once."""
    made: dict[tuple[str, float], Tensor] = {}
    return {name: made.setdefault((name.rpartition(".")[0], float(one)), one) for name, one in scales.items()}


_SMALLEST = 2.0**-126  # whose reciprocal is finite, with the room that x * (1 / scale) needs


def check_seen(names: Iterable[str], calibration: Calibration) -> None:
    """Raise a ValueError unless some batch reached every layer."""
    unseen = sorted(set(names) - set(calibration.names))
    if unseen:
        raise ValueError(f"{', '.join(unseen)}: no calibration batch reached it; add batches that do, or exclude it")
