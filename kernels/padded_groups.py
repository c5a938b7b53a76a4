"""Ragged groups of rows, each filled up with zeros to a multiple of rows, without asking the device for their sizes.

    size[g]    = offsets[g] - offsets[g - 1]
    ends       = cumsum(max(ceil(size / multiple), 1) * multiple)                   where each group ends in the buffer
    source[p]  = the row that goes to row p of the buffer; -1: zeros
    place[t]   = where row t goes; -1: it is after the last group
    fill(x)    = x[source], zeros where that is -1                                  [T, C] -> [room, C]
    cut(y)     = y[place], zeros where that is -1                                   [room, C] -> [T, C]

offsets: [G] int32 or int64, where each group of [T, C] ends. The buffer has ``room`` rows, the most that T rows in G
groups can need; what is after the last group is zeros. No group is empty in it, so that a contraction over an empty
group is a sum of zeros and not left to a library.

Everything is plain operations on indices, which Inductor fuses: to fill is a read through an index in the kernel that
reads x anyway.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

Size = int | torch.SymInt


def room_for(rows: Size, groups: int, multiple: int) -> Size:
    """How many rows the buffer has."""
    return (rows + groups * multiple) // multiple * multiple


def layout(offsets: Tensor, rows: Size, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """ends [G], source [room] and place [T], int32."""
    groups = offsets.shape[0]
    offsets = offsets.to(torch.int32)
    starts = torch.nn.functional.pad(offsets[:-1], (1, 0))
    filled = ((offsets - starts + (multiple - 1)) // multiple).clamp_min(1) * multiple
    ends = filled.cumsum(0, dtype=torch.int32)
    new_starts = ends - filled

    def moved(size: Size, by: Tensor, first: Tensor, other_first: Tensor, last: Tensor) -> Tensor:
        """Rows counted from the beginning of their group in the other layout; -1 beyond its last one."""
        row = torch.arange(cast(int, size), device=offsets.device, dtype=torch.int32)
        group = torch.bucketize(row, by, out_int32=True, right=True).clamp_max(groups - 1)
        other = row - first[group] + other_first[group]
        return torch.where(other < last[group], other, -1)

    source = moved(room_for(rows, groups, multiple), ends, new_starts, starts, offsets)
    place = moved(rows, offsets, starts, new_starts, new_starts + (offsets - starts))
    return ends, source, place


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of x that ``source`` or ``place`` names; zeros where it is -1. FP8 is moved as bytes."""
    moved = x.view(torch.int8) if x.dtype.itemsize == 1 else x
    zero = torch.zeros((), dtype=moved.dtype, device=x.device)
    taken = torch.where((rows >= 0)[:, None], moved[rows.clamp_min(0)], zero)
    return taken if moved is x else taken.view(x.dtype)
