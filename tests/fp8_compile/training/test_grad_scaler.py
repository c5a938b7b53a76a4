"""torch.amp.GradScaler outside the graphs: its factor changes from one step to the next, and gradients with it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Config, scaling_state

BAD = 7  # a step with a loss that is not finite: the scaler backs off


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])


def decibels_by_scale(recipe: str, half: bool, growth: float) -> tuple[list[tuple[float, float]], Any]:
    """(scale, SQNR of the unscaled gradients against FP32's at the same weights) of every step, and the state."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16))
    dtype = torch.float16 if half else torch.float32
    model.to(dtype)
    compiled = torch.compile(model, backend=UncompiledBackend(Config(recipe=recipe)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    train = fp8_compile.attach(compiled, optimizer, master_weights=half)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**10, growth_factor=growth, backoff_factor=1 / growth, growth_interval=2
    )
    found, generator = [], torch.Generator().manual_seed(1)
    for step in range(12):
        x, goal = torch.randn(64, 32, generator=generator), torch.randn(64, 16, generator=generator)
        full = copy.deepcopy(model).float()
        full.zero_grad()
        (full(x) - goal).square().mean().backward()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=not half):
            output = compiled(x.to(dtype))
        loss = (output.float() - goal).square().mean() * (math.inf if step == BAD else 1.0)
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        if step != BAD:
            right = flat(full)
            found.append((scale, 20 * math.log10(right.norm() / (flat(model) / scale - right).norm())))
        scaler.step(optimizer)
        scaler.update()
    assert train.steps == 11, "the scaler left out the bad one"
    return found, scaling_state(model)


@pytest.mark.parametrize("half", [True, False], ids=["fp16", "autocast"])
@pytest.mark.parametrize("growth", [2.0, 4.0])
def test_a_scale_that_grows_or_backs_off_saturates_no_gradient(half: bool, growth: float) -> None:
    found, state = decibels_by_scale("delayed", half, growth)
    right, _ = decibels_by_scale("tensorwise", half, growth)
    print(
        " ".join(f"2^{math.log2(scale):.0f}: {one:.1f}/{other:.1f}" for (scale, one), (_, other) in zip(found, right))
    )
    scales = [scale for scale, _ in found]
    assert max(scales) >= scales[0] * growth**3 and any(later < earlier for earlier, later in zip(scales, scales[1:]))
    assert all(one > other - 1.0 for (_, one), (_, other) in zip(found, right))
    assert not any(row.saturated or row.small for row in state.stats())
