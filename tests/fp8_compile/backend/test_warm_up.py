"""The first steps are in high precision, and when they are over the scales are there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Config, scaling_state

D = 32


class Model(nn.Module):
    """A shared input, a stack of products, a layer that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.lm_head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.experts = nn.Parameter(torch.randn(2, D, D) / D)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.q(x)) * self.k(x)
        return self.lm_head((x.expand(2, -1, -1) @ self.experts).sum(0))


def gradients(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output = run(x)
    output.square().mean().backward()
    return [output.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def error(one: list[Tensor], two: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, two))


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_warm_up_is_exact_and_records_what_fp8_would_have_recorded(target: str) -> None:
    model = Model()
    direct = copy.deepcopy(model)
    options = {"target": target, "amax_history_len": 4}
    warm = torch.compile(model, backend=UncompiledBackend(Config(warmup_steps=2, **options)))
    cold = torch.compile(direct, backend=UncompiledBackend(Config(**options)))
    xs = [torch.randn(16, D) for _ in range(4)]
    for step, x in enumerate(xs):
        result, exact = gradients(model, warm, x), gradients(model, model, x)
        gradients(direct, cold, x)
        if step < 2:
            assert error(result, exact) < 1e-6
        else:
            assert error(result, exact) > 1e-3, "FP8 by now"
    one, two = (scaling_state(run).state_dict() for run in (model, direct))
    assert set(one) == set(two), "the same tensors have the same slots"
    for key in one:
        if key.endswith("counts"):
            assert one[key][:2].tolist() == [4, 4]
        elif "history" in key and ".input" in key and key.startswith("q"):
            assert torch.equal(one[key], two[key])
        elif "history" in key:  # gradients of an FP8 model differ by its rounding
            torch.testing.assert_close(one[key], two[key], rtol=0.2, atol=0)


def test_steps_of_an_attached_optimizer_count_not_micro_batches_recomputations_or_evaluations() -> None:
    model = Model()
    compiled = torch.compile(model, backend=UncompiledBackend(Config(warmup_steps=2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train = fp8_compile.attach(compiled, optimizer, loss_scale="dynamic")
    x, in_fp8 = torch.randn(16, D), []
    for step in range(4):
        for _ in range(2):
            with torch.no_grad():
                compiled(x)
            result = checkpoint(compiled, x.requires_grad_(), use_reentrant=False)
            in_fp8.append(bool((result - model(x)).abs().max() > 1e-5))
            result.mean().backward()
        if step == 1:
            model.q.weight.grad.fill_(torch.nan)
        optimizer.step()
        optimizer.zero_grad()
    assert in_fp8 == 6 * [False] + 2 * [True], "two good steps and a skipped one"
    assert (train.steps, train.skipped_steps) == (3, 1)


def test_a_loaded_state_ends_the_warm_up() -> None:
    model = Model()
    compiled = torch.compile(model, backend=UncompiledBackend(Config(warmup_steps=2)))
    x = torch.randn(16, D)
    for _ in range(2):
        gradients(model, compiled, x)
    state = scaling_state(model).state_dict()
    torch._dynamo.reset()
    other = copy.deepcopy(model)
    scaling_state(other).load_state_dict(state)
    again = torch.compile(other, backend=UncompiledBackend(Config(warmup_steps=2)))
    assert error(gradients(other, again, x), gradients(other, other, x)) > 1e-3
