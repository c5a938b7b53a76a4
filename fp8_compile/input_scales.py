"""Static scales of layers' inputs, from a calibration.

scale = amax / 448         a fp32 scalar: x / scale reaches E4M3's largest value where x reaches the calibration's
"""

from __future__ import annotations

from typing import Iterable

from torch import Tensor

from fp8_compile.kernels.formats import E4M3

from .calibration import Calibration


def static_scales(names: Iterable[str], calibration: Calibration) -> dict[str, Tensor]:
    """The scale of each layer's input; layers whose inputs were all zeros have none.

    Siblings of one amax (q, k and v) share one tensor, by which the compiler sees that their input is to be quantized
    once.
    """
    names = list(names)
    check_seen(names, calibration)
    made: dict[tuple[str, float], Tensor] = {}
    scales = {}
    for name in names:
        amax = calibration.amax(name)
        if amax > 0:
            key = name.rpartition(".")[0], float(amax)
            scales[name] = made.setdefault(key, (amax / E4M3.max).clamp(min=_SMALLEST))
    return scales


_SMALLEST = 2.0**-126  # whose reciprocal is finite, with the room that x * (1 / scale) needs


def check_seen(names: Iterable[str], calibration: Calibration) -> None:
    """Every layer was reached by some batch."""
    unseen = sorted(set(names) - set(calibration.names))
    if unseen:
        raise ValueError(f"{', '.join(unseen)}: no calibration batch reached it; add batches that do, or exclude it")
