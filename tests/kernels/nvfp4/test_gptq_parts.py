"""The parts of GPTQ, each against what it says it does, computed in FP64 or by trying everything."""

from __future__ import annotations

import ctypes
import itertools
import math

import pytest
import torch
from instruction_sets import RUNNABLE

from fp8_compile.kernels.cpu import library, nvfp4_search
from fp8_compile.kernels.nvfp4 import code_search, e2m1, scale_paths
from fp8_compile.kernels.nvfp4.curvature import damped, inverse_factor
from fp8_compile.kernels.nvfp4.feedback import TO_ZERO, round_blocks
from fp8_compile.kernels.nvfp4.refine import refine
from fp8_compile.kernels.nvfp4.scale_paths import best_scales
from fp8_compile.kernels.nvfp4.weight import SCALE_DTYPE

SIZE = 16


def problem(rows: int, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights [K, N] in units of the global scale, a Hessian, and its factor."""
    k = SIZE * blocks
    x = torch.randn(256, k) @ (torch.randn(k, k) / k**0.5 + torch.eye(k)) + torch.randn(k)
    h = damped(x.t() @ x / len(x), 0.01)
    return torch.randn(k, rows) * 100, h, inverse_factor(h)


def cost(
    values: torch.Tensor, weights: torch.Tensor, h: torch.Tensor, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """(q - w)^T H (q - w) of each row in FP64; values: real ones, or by the scales that are given."""
    if scales is not None:
        values = values * scales.repeat_interleave(len(values) // len(scales), 0)
    e = (values - weights).double()
    return ((h.double() @ e) * e).sum(0)


def scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return values * scales.repeat_interleave(SIZE, 0)


def start_scales(weights: torch.Tensor) -> torch.Tensor:
    return (weights.abs().view(-1, SIZE, weights.shape[1]).amax(1) / 6).to(SCALE_DTYPE).float()


def test_rounding_with_feedback_is_gptq_as_the_formula_has_it() -> None:
    weights, h, factor = problem(7, 3)
    scales = start_scales(weights)
    scales[1, 2] = TO_ZERO
    rounded = round_blocks(weights, scales, factor)
    now, every, spent = weights.double(), scales.repeat_interleave(SIZE, 0), 0.0
    u = factor.double()
    for j in range(len(weights)):
        q = e2m1.rounded((now[j] / every[j].double()).float()).double() * every[j]
        assert torch.equal(q, rounded[j].double() * every[j])
        e = (now[j] - q) / u[j, j]
        now[j + 1 :] -= u[j, j + 1 :, None] * e
        spent += e.square()
    assert not rounded[SIZE : 2 * SIZE, 2].any()
    torch.testing.assert_close(spent, cost(scaled(rounded, scales), weights, h), rtol=1e-4, atol=0)


def test_with_paths_enough_for_all_ways_the_search_finds_the_best_of_all() -> None:
    weights, h, factor = problem(5, 3)
    kept_zero = torch.zeros(5, 3, dtype=torch.bool)
    kept_zero[1, 1] = True
    found = best_scales(weights.t(), kept_zero, factor, SIZE, paths=64, candidates=(1, 2)).t()
    greedy = best_scales(weights.t(), kept_zero, factor, SIZE, paths=1, candidates=(1, 2)).t()

    def total(scales: torch.Tensor) -> torch.Tensor:
        taken = torch.where(kept_zero.t(), TO_ZERO, scales)
        return cost(scaled(round_blocks(weights, taken, factor), scales), weights, h)

    # What a block's candidates are follows from the blocks before it: all 4 * 4 * 4 ways, one after the other.
    least = torch.full((5,), torch.inf, dtype=torch.float64)
    for way in itertools.product(range(-1, 3), repeat=3):
        scales, now = [], weights
        for block, offset in enumerate(way):
            largest = now[block * SIZE : (block + 1) * SIZE].abs().amax(0) / 6
            byte = largest.clamp(2.0**-9, 448.0).to(SCALE_DTYPE).view(torch.uint8).int() + offset
            scales.append(byte.clamp(1, 126).to(torch.uint8).view(SCALE_DTYPE).float())
            taken = torch.where(kept_zero.t()[: block + 1], TO_ZERO, torch.stack(scales))
            now = _left(weights, taken, factor)
        least = torch.minimum(least, total(torch.stack(scales)))
    torch.testing.assert_close(total(found), least, rtol=1e-4, atol=0)
    assert (total(found) <= total(greedy) * (1 + 1e-4)).all() and total(found).sum() < total(greedy).sum()


def _left(weights: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The weights, once the first blocks are rounded and their errors fed forward."""
    now, every = weights.double(), scales.repeat_interleave(SIZE, 0)
    for j in range(len(every)):
        q = e2m1.rounded((now[j] / every[j]).float()).double() * every[j]
        now[j + 1 :] -= factor.double()[j, j + 1 :, None] * ((now[j] - q) / factor.double()[j, j])
    return now.float()


def test_no_row_is_worse_after_the_descent_and_zeros_stay() -> None:
    weights, h, factor = problem(64, 6)
    kept_zero = torch.zeros(6, 64, dtype=torch.bool)
    kept_zero[2, :8] = True
    scales = start_scales(weights)
    values = round_blocks(weights, torch.where(kept_zero, TO_ZERO, scales), factor)
    costs = [cost(scaled(values, scales), weights, h)]
    for passes in (0, 1, 3):
        after, chosen = refine(weights, values, scales, kept_zero, h, passes, 20, (2, 6))
        assert torch.equal(after, e2m1.rounded(after)), "values of E2M1"
        assert torch.equal(chosen, chosen.to(SCALE_DTYPE).float())
        assert not after[2 * SIZE : 3 * SIZE, :8].any()
        costs.append(cost(scaled(after, chosen), weights, h))
    for before, after in itertools.pairwise(costs):
        assert (after <= before * (1 + 1e-5)).all() and after.sum() < before.sum()


def libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """For this CPU, and for any."""
    own = nvfp4_search.search_library()
    assert own is not None
    return own, nvfp4_search.load(library.cpp_compiler(), RUNNABLE["portable"])


@pytest.mark.parametrize("size, blocks, paths", [(16, 7, 5), (16, 9, 40), (32, 5, 3), (16, 1, 1)])
def test_the_search_of_scales_in_cpp_finds_what_its_reference_finds(size: int, blocks: int, paths: int) -> None:
    weights, h, factor = problem(19, blocks * size // SIZE)
    kept_zero = torch.rand(19, blocks) < 0.1
    weights = torch.where(kept_zero.t().repeat_interleave(size, 0), 0.0, weights)
    arguments = weights.t().contiguous(), kept_zero, factor, size, paths, (2, 6)

    def spent(scales: torch.Tensor) -> torch.Tensor:
        return cost(round_blocks(weights, torch.where(kept_zero.t(), TO_ZERO, scales), factor), weights, h, scales)

    expected = scale_paths.reference(*arguments).t()
    for kernels in libraries():
        found = nvfp4_search.scale_paths(kernels, *arguments).t()
        assert torch.equal(found, found.to(SCALE_DTYPE).float())
        # Sums are not in the same order: where two ways cost the same but for rounding, either may be taken.
        assert (found == expected).all(0).float().mean() > 0.8
        torch.testing.assert_close(spent(found), spent(expected), rtol=0.02, atol=0)


def exact_problem(rows: int, columns: int, size: int) -> tuple[torch.Tensor, ...]:
    """Values, scales, weights and a Hessian of few enough bits that FP32 rounds nothing."""
    values = torch.tensor(code_search.LEVELS)[torch.randint(0, 15, (rows, columns))]
    scales = 2.0 ** torch.randint(0, 2, (rows, columns // size))
    scales[::5, 0] = 0
    x = torch.randint(-1, 2, (columns, columns)).float()
    weights = torch.randint(-40, 41, (rows, columns)) / 4
    return values, scales, weights, x.t() @ x + torch.eye(columns)


def row_costs(values: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    e = values * scales.repeat_interleave(values.shape[1] // scales.shape[1], 1) - weights
    return ((e @ h) * e).sum(1)


def test_the_search_of_codes_in_cpp_is_its_reference_bit_for_bit() -> None:
    for columns, size, steps in ((48, 16, 300), (96, 32, 50), (16, 16, 1)):
        values, scales, weights, h = exact_problem(23, columns, size)
        gradient = (values * scales.repeat_interleave(size, 1) - weights) @ h
        found = code_search.search_codes(values, scales, gradient, h, steps)
        levels = torch.searchsorted(torch.tensor(code_search.LEVELS), values).to(torch.int8)
        expected = code_search.reference(levels, scales, gradient, h, steps, math.isqrt(columns))
        assert torch.equal(found, torch.tensor(code_search.LEVELS)[expected.int()])
        for kernels in libraries():
            again = nvfp4_search.code_search(kernels, levels, scales, gradient, h, steps, math.isqrt(columns))
            assert torch.equal(again, expected)
        assert torch.equal(found[::5, :size], values[::5, :size]), "blocks without a scale stay as they are"
        before, after = (row_costs(one, scales, weights, h) for one in (values, found))
        assert (after <= before).all() and after.sum() < before.sum()


def test_the_search_of_codes_leaves_local_optima_and_more_rows_come_by_the_best_of_all() -> None:
    """Six small weights that are strongly coupled, against all of their 7**6 smallest codes."""
    mixed = torch.randn(3, 6)
    h, weights, scales = mixed.t() @ mixed + 0.05 * torch.eye(6), torch.rand(50, 6) - 0.5, torch.ones(50, 1)
    every = torch.cartesian_prod(*[torch.tensor(code_search.LEVELS[4:11])] * 6)
    least = torch.stack([(((every - w) @ h) * (every - w)).sum(1).amin() for w in weights])
    start = e2m1.rounded(weights)
    gradient = (start - weights) @ h

    optimal, excess = {}, {}
    for steps in (3, 500):
        found = row_costs(code_search.search_codes(start, scales, gradient, h, steps), scales, weights, h)
        assert (found >= least * (1 - 1e-4)).all()
        optimal[steps], excess[steps] = (found <= least * (1 + 1e-4)).float().mean(), (found - least).sum()
    assert optimal[500] > optimal[3] + 0.15 and excess[500] < 0.5 * excess[3], (optimal, excess)
