"""The FP8 gemm of ragged groups for CPUs against the plain formula and FP64, for every instruction set that this
machine can run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from instruction_sets import RUNNABLE, using
from torch import Tensor

from fp8_compile.kernels import scaled_grouped_mm as plain
from fp8_compile.kernels.cpu.scaled_grouped_mm import scaled_grouped_mm_op

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST_ERROR = 1e-6  # of the whole result, by its norm, as for one gemm
# No group, one, several with empty ones in front, between and behind, and tokens that belong to none.
OFFSETS = {"one group": [37], "all in one": [0, 37, 37], "ragged": [0, 1, 5, 5, 30, 37, 37], "with a rest": [8, 8, 29]}


@pytest.fixture(params=RUNNABLE)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """The gemm with the instructions of the parameter."""
    with using(request.param):
        yield request.param


def operand(*shape: int, dtype: torch.dtype, columns: bool, seed: int) -> Tensor:
    """Normal numbers in FP8; ``columns``: the last dimension but one is contiguous."""
    generator = torch.Generator().manual_seed(seed)
    shape = (*shape[:-2], shape[-1], shape[-2]) if columns else shape
    q = (torch.randn(shape, generator=generator) * 4).to(dtype)
    return q.transpose(-1, -2) if columns else q


def problem(offsets: list[int], kind: str, *, columns: bool, n: int = 33, k: int = 70) -> tuple[Tensor, ...]:
    """Operands, offsets and scales: of the output with ``kind`` "rows", of the gradient of weights otherwise."""
    groups, tokens = len(offsets), 37
    ends = torch.tensor(offsets, dtype=torch.int32)
    if kind == "rows":
        left = operand(tokens, k, dtype=E5M2, columns=False, seed=1)
        right = operand(groups, k, n, dtype=E4M3, columns=columns, seed=2)
        return left, right, ends, torch.rand(tokens, 1) + 0.5, torch.rand(groups, 1, n) + 0.5
    left = operand(k, tokens, dtype=E5M2, columns=columns, seed=1)
    right = operand(tokens, n, dtype=E4M3, columns=False, seed=2)
    return left, right, ends, torch.rand(k, 1) + 0.5, torch.rand(1, n) + 0.5


def exact(left: Tensor, right: Tensor, offsets: Tensor, scale_left: Tensor, scale_right: Tensor) -> Tensor:
    """In FP64: every token with every group's matrix, and a mask of who belongs where."""
    tokens = left.shape[0 if right.dim() == 3 else 1]
    starts = torch.cat([offsets.new_zeros(1), offsets[:-1]])
    token = torch.arange(tokens)
    member = ((token >= starts[:, None]) & (token < offsets[:, None])).double()  # [G, T]
    a, b = left.double() * scale_left.double(), right.double() * scale_right.double()
    if right.dim() == 3:
        return torch.einsum("gt,tk,gkn->tn", member, a, b)
    return torch.einsum("gt,mt,tn->gmn", member, a, b)


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("kind", ["rows", "contraction"])
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS)
def test_it_agrees_with_fp64(kernels: str, offsets: list[int], kind: str, columns: bool) -> None:
    given = problem(offsets, kind, columns=columns)
    expected = exact(*given)
    result = scaled_grouped_mm_op(*given, torch.float32)
    assert result.shape == expected.shape
    assert (result - expected).norm() <= LARGEST_ERROR * expected.norm()


@pytest.mark.parametrize("kind", ["rows", "contraction"])
def test_one_scale_a_tensor_and_16_bits_are_the_plain_formula(kernels: str, kind: str) -> None:
    left, right, offsets, *_ = problem(OFFSETS["ragged"], kind, columns=True)
    scales = torch.full((1, 1), 0.25), torch.full((1, 1), 2.0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        result = scaled_grouped_mm_op(left, right, offsets, *scales, dtype)
        expected = plain.scaled_grouped_mm(left, right, offsets, *scales, dtype)
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("kind", ["rows", "contraction"])
def test_many_and_large_groups_are_divided_between_threads_without_changing_a_bit(kind: str) -> None:
    sizes = torch.tensor([700, 3, 0, 40, 40, 40, 40, 161])
    ends, tokens = sizes.cumsum(0), 1024
    if kind == "rows":
        left = operand(tokens, 256, dtype=E4M3, columns=False, seed=1)
        right = operand(len(sizes), 256, 192, dtype=E4M3, columns=True, seed=2)
    else:
        left = operand(256, tokens, dtype=E4M3, columns=True, seed=1)
        right = operand(tokens, 192, dtype=E4M3, columns=False, seed=2)
    one, before = torch.ones(1, 1), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(scaled_grouped_mm_op(left, right, ends, one, one, torch.float32))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    expected = exact(left, right, ends, one, one)
    assert (results[0] - expected).norm() <= LARGEST_ERROR * expected.norm()


def test_a_scale_that_is_not_finite_reaches_every_group_even_an_empty_one(kernels: str) -> None:
    left, right, offsets, *_ = problem(OFFSETS["ragged"], "contraction", columns=False)
    nan, one = torch.full((1, 1), torch.nan), torch.ones(1, 1)
    assert scaled_grouped_mm_op(left, right, offsets, nan, one, torch.float32).isnan().all()
    assert plain.scaled_grouped_mm(left, right, offsets, nan, one, torch.float32).isnan().all()


def test_a_nan_among_the_codes_stays_in_its_token_and_in_its_group(kernels: str) -> None:
    one, nan = torch.ones(1, 1), torch.tensor(torch.nan).to(E5M2)
    left, right, offsets, *_ = problem(OFFSETS["ragged"], "rows", columns=True)
    left[7, 3] = nan
    wrong = scaled_grouped_mm_op(left, right, offsets, one, one, torch.float32).isnan()
    assert wrong.any(1).nonzero().tolist() == [[7]]
    left, right, offsets, *_ = problem(OFFSETS["ragged"], "contraction", columns=False)
    left[3, 7] = nan  # token 7 belongs to the group that ends at 30
    wrong = scaled_grouped_mm_op(left, right, offsets, one, one, torch.float32).isnan()
    assert wrong.any(-1).nonzero().tolist() == [[4, 3]]


def test_no_tokens_and_no_groups_are_a_result() -> None:
    one, none = torch.ones(1, 1), torch.zeros(0, dtype=torch.int32)
    empty = torch.empty(0, 16).to(E4M3)
    weights = operand(2, 16, 8, dtype=E4M3, columns=False, seed=0)
    nobody = torch.zeros(2, dtype=torch.int32)
    assert scaled_grouped_mm_op(empty, weights, nobody, one, one, torch.float32).shape == (0, 8)
    grad = scaled_grouped_mm_op(empty.t(), torch.empty(0, 8).to(E4M3), nobody, one, one, torch.float32)
    assert torch.equal(grad, torch.zeros(2, 16, 8))
    rows = operand(5, 16, dtype=E4M3, columns=False, seed=0)
    assert torch.equal(scaled_grouped_mm_op(rows, weights[:0], none, one, one, torch.float32), torch.zeros(5, 8))


def test_offsets_behind_the_last_token_are_refused_before_memory_is_read() -> None:
    left, right, _, *scales = problem([10, 37], "rows", columns=False)
    with pytest.raises(RuntimeError, match="not exceed the number of tokens, 37"):
        scaled_grouped_mm_op(left, right, torch.tensor([10, 38], dtype=torch.int32), *scales, torch.float32)


def test_without_a_compiler_the_plain_formula_runs() -> None:
    given = problem(OFFSETS["ragged"], "rows", columns=False)
    expected = scaled_grouped_mm_op(*given, torch.float32)
    torch.testing.assert_close(torch.ops.fp8_compile.scaled_grouped_mm_formula(*given, torch.float32), expected)


def test_torch_finds_its_fake_right() -> None:
    for kind in ("rows", "contraction"):
        given = problem(OFFSETS["ragged"], kind, columns=True)
        torch.library.opcheck(scaled_grouped_mm_op, (*given, torch.bfloat16), test_utils="test_faketensor")
