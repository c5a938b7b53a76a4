"""Groups of rows that are filled up to multiples: every row is found again, whatever the sizes are."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8_compile.kernels.padded_groups import layout, room_for, take_rows

sizes_of_groups = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def filled_by_hand(x: Tensor, sizes: list[int], multiple: int) -> Tensor:
    """Group by group, in Python."""
    parts = []
    for part in x[: sum(sizes)].split(sizes):
        rows = max(-(-len(part) // multiple), 1) * multiple
        parts.append(torch.nn.functional.pad(part, (0, 0, 0, rows - len(part))))
    return torch.cat(parts)


@settings(deadline=None, max_examples=60)
@given(sizes_of_groups, st.integers(0, 20), st.sampled_from([1, 4, 16, 32, 128]))
def test_groups_are_filled_up_as_by_hand_and_cut_back_to_what_they_were(
    sizes: list[int], rest: int, multiple: int
) -> None:
    rows = max(sum(sizes) + rest, 1)
    x = torch.arange(1.0, 1 + rows * 3).view(rows, 3)
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    ends, source, place = layout(offsets, rows, multiple)
    filled, expected = take_rows(x, source), filled_by_hand(x, sizes, multiple)
    assert len(filled) == room_for(rows, len(sizes), multiple) >= len(expected)
    assert torch.equal(filled[: len(expected)], expected) and not filled[len(expected) :].any()
    assert ends.tolist() == torch.tensor([max(-(-size // multiple), 1) * multiple for size in sizes]).cumsum(0).tolist()
    back = take_rows(filled + 1, place)
    assert torch.equal(back[: sum(sizes)], x[: sum(sizes)] + 1)
    assert not back[sum(sizes) :].any()  # rows after the last group


def test_nan_stays_in_its_row_and_bytes_of_fp8_are_moved_as_they_are() -> None:
    _, source, place = layout(torch.tensor([1, 3]), 4, 2)
    x = torch.tensor([[1.0], [torch.nan], [-0.0], [torch.inf]])
    moved = take_rows(x, source)
    assert moved.isnan().view(-1).tolist() == [False, False, True, False, *[False] * (len(moved) - 4)]
    assert moved.isfinite().sum() == len(moved) - 1  # the last row is in no group
    q = x.to(torch.float8_e4m3fn)
    again = take_rows(take_rows(q, source), place)
    assert torch.equal(again.view(torch.uint8)[:3], q.view(torch.uint8)[:3]) and again.dtype == q.dtype
