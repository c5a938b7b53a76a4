"""``stats=True`` with MXFP8 and NVFP4: what became of blocks, against the formulas, in compiled code too."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uncompiled import CODE_ANEW, UncompiledBackend

from fp8_compile import Backend, Config, scaling_state
from fp8_compile.kernels.block_counts import count_mx, count_nvfp4
from fp8_compile.kernels.mxfp8 import dequantize_mx, quantize_mx
from fp8_compile.kernels.nvfp4_training import dequantize_nvfp4, global_scale, quantize_nvfp4
from fp8_compile.scaling.stats import StatsRow


def mx(x: Tensor) -> Tensor:
    return dequantize_mx(*quantize_mx(x, (1, 32)), (1, 32))


def nvfp4(x: Tensor, enc: Tensor) -> Tensor:
    return dequantize_nvfp4(*quantize_nvfp4(x, enc, (1, 16), False, False, None, 0, False)) * enc.reciprocal()


def sqnr(x: Tensor, back: Tensor) -> float:
    return 10 * math.log10(x.double().square().sum() / (x.double() - back.double()).square().sum())


def test_mxfp8_counts_flushed_elements_and_scales_at_the_ends() -> None:
    x = torch.randn(4, 64)
    x[0, :32] = 2.0**-140  # below 448 * 2**-127: the smallest scale, and too small for a code
    x[1, 32:], x[1, 32] = 1e-12, 1.0  # flushed beside a large element
    x[2, :32] = 0  # a block of zeros counts for nothing
    elements, overflow, underflow, signal, noise, blocks, at_ends = count_mx(x, mx(x), (1, 32)).tolist()
    assert (elements, overflow, underflow, blocks, at_ends) == (256, 0, 32 + 31, 7, 1)
    assert 10 * math.log10(signal / noise) == pytest.approx(sqnr(x, mx(x)), abs=1e-6)


def test_nvfp4_counts_what_is_cut_off_by_a_stale_scale() -> None:
    x = torch.randn(4, 64)
    stale = global_scale(x)[0]
    x[0, :16] *= 100  # the block's scale would be above 448
    x[1, 16:32] *= 1e-7  # and here below 2**-9
    elements, overflow, underflow, *_, blocks, at_ends = count_nvfp4(x, nvfp4(x, stale), stale, (1, 16)).tolist()
    assert (elements, blocks) == (256, 16) and at_ends >= 2
    cut = (x[0, :16].abs() * stale > 6 * 448).sum().item()
    assert overflow == cut > 0 and underflow >= 16


def test_what_is_not_finite_is_not_counted() -> None:
    x = torch.randn(2, 32)
    x[0, 3] = torch.inf
    counted = count_mx(x, mx(x), (1, 32))
    assert counted.isfinite().all() and counted[0] == 63 and counted[5] == 1


def rows_of(backend: Any, x: Tensor) -> dict[str, StatsRow]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(x).square().mean().backward()
    return {row.slot: row for row in scaling_state(compiled).stats()}


EXACT = {"recipe": "nvfp4", "global_scale": "exact"}


MXFP8, NVFP4 = ({"recipe": "mxfp8"}, 31.0), ({"recipe": "nvfp4"}, 20.0)


@pytest.mark.parametrize(
    "kind, options, expected",
    [
        *(pytest.param(UncompiledBackend, *one, id=f"interpreted-{one[0]}") for one in (MXFP8, NVFP4, (EXACT, 20.0))),
        # Compiled, an exact scale differs from a delayed one in where it comes from, not in how blocks are counted.
        *(pytest.param(Backend, *one, id=f"compiled-{one[0]}") for one in (MXFP8, NVFP4)),
    ],
)
def test_rows_have_the_noise_of_what_forward_multiplies(kind: Any, options: dict[str, Any], expected: float) -> None:
    x, recipe = torch.randn(48, 64) * torch.randn(48, 1).exp(), options["recipe"]
    rows = rows_of(kind(Config(**options, stats=True, keep_last=0, inductor=CODE_ANEW)), x)
    found = rows["0#0.input"]
    assert found.elements == 2 * x.numel() and found.blocks == found.elements // (32 if recipe == "mxfp8" else 16)
    assert found.sqnr == pytest.approx(sqnr(x, mx(x) if recipe == "mxfp8" else nvfp4(x, global_scale(x)[0])), abs=0.5)
    assert abs(rows["2#0.weight"].sqnr - expected) < 2.5 and abs(rows["2#0.grad_output"].sqnr - expected) < 4


@pytest.mark.parametrize("options", [{"recipe": "mxfp8"}, EXACT], ids=["mxfp8", "exact"])
def test_a_tensor_that_has_its_own_scale_is_never_saturated_however_it_jumps(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    compiled = torch.compile(model, backend=UncompiledBackend(Config(**options, stats=True, keep_last=0)))
    for factor in (1.0, 1.0, 1e4, 1.0):
        compiled(factor * torch.randn(48, 64)).square().mean().backward()
    rows = {row.slot: row for row in scaling_state(model).stats()}
    assert len(rows) >= 5
    assert all((row.saturated, row.small, row.overflow, row.scale) == (0, 0, 0, 0) for row in rows.values())
    assert rows["0#0.input"].steps == 4 and "none was ever saturated" in str(scaling_state(model))


@pytest.mark.parametrize("options", [{"recipe": "mxfp8"}, EXACT], ids=["mxfp8", "exact"])
def test_without_stats_no_state_is_kept_and_with_it_results_are_the_same(options: dict[str, Any]) -> None:
    results = []
    for stats in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        compiled = torch.compile(model, backend=UncompiledBackend(Config(**options, stats=stats, keep_last=0)))
        y = compiled(torch.randn(32, 64))
        y.square().mean().backward()
        results.append((y, model.weight.grad))
        assert bool(list(scaling_state(model).stats())) == stats
        assert ("blocks at ends" in str(scaling_state(model).stats())) == stats
    assert all(torch.equal(one, other) for one, other in zip(*results))
