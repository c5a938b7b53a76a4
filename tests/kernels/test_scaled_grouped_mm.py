"""The formula of ragged groups against FP64, and what is refused."""

from __future__ import annotations

import pytest
import torch

from fp8_compile.kernels.scaled_grouped_mm import scaled_grouped_mm

E4M3 = torch.float8_e4m3fn


def whole_numbers(*shape: int) -> torch.Tensor:
    """In FP8, and so small that every sum is exact in FP32."""
    return torch.randint(-8, 9, shape).to(E4M3)


def test_each_group_of_rows_is_multiplied_by_its_own_matrix_and_the_rest_is_zeros() -> None:
    left, right, one = whole_numbers(7, 5), whole_numbers(3, 5, 4), torch.ones(1, 1)
    y = scaled_grouped_mm(left, right, torch.tensor([2, 2, 6]), one, one * 0.5, torch.float32)
    x, w = left.double(), right.double()
    expected = torch.cat([x[:2] @ w[0], x[2:6] @ w[2], torch.zeros(1, 4)]) * 0.5
    assert torch.equal(y.double(), expected)


def test_each_group_of_the_contraction_is_a_product_of_its_own_and_an_empty_one_is_zeros() -> None:
    left, right, one = whole_numbers(5, 7), whole_numbers(7, 4), torch.ones(1, 1)
    y = scaled_grouped_mm(left, right, torch.tensor([2, 2, 6]), one, one, torch.float32)
    x, dy = left.double(), right.double()
    expected = torch.stack([x[:, :2] @ dy[:2], torch.zeros(5, 4, dtype=torch.float64), x[:, 2:6] @ dy[2:6]])
    assert torch.equal(y.double(), expected)


def test_scales_of_rows_go_with_their_groups() -> None:
    left, right, offsets = whole_numbers(6, 5), whole_numbers(2, 5, 4), torch.tensor([4, 6])
    rows, cols = 2.0 ** torch.arange(6).view(6, 1), 2.0 ** torch.arange(8).view(2, 1, 4)
    one = torch.ones(1, 1)
    plain = scaled_grouped_mm(left, right, offsets, one, one, torch.float32)
    scaled = scaled_grouped_mm(left, right, offsets, rows, cols, torch.float32)
    assert torch.equal(scaled, plain * rows * cols[:, 0].repeat_interleave(torch.tensor([4, 2]), 0))
    columns = 2.0 ** torch.arange(4).view(1, 4)
    plain = scaled_grouped_mm(left.t(), right[0, :1].expand(6, 4), offsets, one, one, torch.float32)
    scaled = scaled_grouped_mm(left.t(), right[0, :1].expand(6, 4), offsets, rows[:5], columns, torch.float32)
    assert torch.equal(scaled, plain * rows[:5] * columns)


@pytest.mark.parametrize("offsets", [[4, 2, 6], [2, 4, 9], [-1, 4, 6]], ids=["falling", "too far", "negative"])
def test_offsets_that_are_no_bounds_of_groups_are_refused(offsets: list[int]) -> None:
    left, right, one = whole_numbers(6, 5), whole_numbers(3, 5, 4), torch.ones(1, 1)
    with pytest.raises(RuntimeError, match=r"must not fall, and not exceed the number of tokens, 6; got \["):
        scaled_grouped_mm(left, right, torch.tensor(offsets), one, one, torch.float32)
