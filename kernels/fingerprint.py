"""A fingerprint of a matrix from a sample of its elements: enough to notice that someone has written other weights.

    fingerprint(x) = sum of mix(bits(x[offset(e)]) + (e + 1) * GAMMA)  mod 2**64      over the samples e = 0 .. 255

The samples are 16 places of 16 neighbours each. The matrix, read as one long row, is divided evenly among the places,
and multiples of the golden ratio say where in its share each one is: so they are spread over rows and columns.
Neighbours come from the same cache line and cost next to nothing. They are needed for 16-bit weights: two that differ
little, such as a weight and its average over the last steps, are equal in many elements. ``mix`` is the finalizer of
SplitMix64.

x: fp32, bf16 or fp16, contiguous. An element beyond the end counts as if its bits were 0.

A write that changes only a few elements, or a row or a column of a large matrix, can miss all samples.

This is the reference of ``kernels/cpu/fingerprint.cpp`` and ``kernels/gpu/fingerprint.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

PLACES, WIDTH = 16, 16
SAMPLES = PLACES * WIDTH
GOLDEN = 0x9E3779B1  # the golden ratio's fraction, times 2**32
# Of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators), as signed integers.
GAMMA, FIRST, SECOND = (value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def fingerprint(x: Tensor) -> int:
    """The fingerprint as a signed 64-bit integer."""
    e = torch.arange(SAMPLES)
    offset = sample_offsets(x.numel())
    inside = offset < x.numel()
    bits = torch.zeros(SAMPLES, dtype=torch.int64)
    width = 8 * x.element_size()
    as_integers = x.reshape(-1).view(torch.int32 if width == 32 else torch.int16)
    bits[inside] = as_integers[offset[inside]].to("cpu", torch.int64) & (2**width - 1)
    return int(_mix(bits + (e + 1) * GAMMA).sum())


def sample_offsets(numel: int) -> Tensor:
    """Which elements are looked at, those beyond the end included: [SAMPLES] int64."""
    e = torch.arange(SAMPLES)
    place = e // WIDTH
    # A 28-bit fraction: 4 bits for the share, 24 for where in it. The product holds for up to 2**39 elements.
    fraction = (place << 24) + ((place * GOLDEN & 0xFFFFFFFF) >> 8)
    groups = (numel + WIDTH - 1) // WIDTH
    return (fraction * groups >> 28) * WIDTH + e % WIDTH


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * FIRST
    z = (z ^ _shifted(z, 27)) * SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, by: int) -> Tensor:
    """A shift to the right that fills up with zeros; that of PyTorch fills up with the sign."""
    return (z >> by) & (2 ** (64 - by) - 1)
