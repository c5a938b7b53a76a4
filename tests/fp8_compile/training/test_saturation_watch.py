"""The watch on saturation: what it says and when, and steps that are skipped because of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Config, scaling_state
from fp8_compile.training.saturation_watch import EVERY

D = 32


class Run:
    """Two layers with an optimizer attached."""

    def __init__(self, **arguments: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
        self.compiled = torch.compile(self.model, backend=UncompiledBackend(Config()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.train = fp8_compile.attach(self.compiled, self.optimizer, **arguments)

    def step(self, *sizes: float) -> None:
        for size in sizes:
            (self.compiled(torch.randn(16, D)).square().mean() * size).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.model.state_dict())


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fp8_compile"]


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], two[name]) for name in one)


def test_a_tensor_that_is_saturated_is_named_again_when_it_happened_twice_as_often(caplog) -> None:
    run = Run()
    for _ in range(3):
        run.step(1.0)
    assert said(caplog) == []
    for size in (1e4, 1e8, 1e12):  # each beyond a gradient's margin of 64
        run.step(size)
        run.step(size)
    messages = said(caplog)
    assert "1#0.grad_output was saturated in 1 of" in messages[0] and "saturation='skip'" in messages[0]
    counts = [message for message in messages if "1#0.grad_output was saturated" in message]
    assert len(counts) == 2, "at the first and the second, not at the third"


def test_later_only_every_eighth_step_is_looked_at(caplog) -> None:
    run = Run()
    for _ in range(EVERY):
        run.step(1.0)
    run.step(1e6)
    run.step(1e6)
    assert said(caplog) == []
    for _ in range(EVERY):
        run.step(1e6)
    assert len(said(caplog)) == 1


def test_a_step_in_which_a_gradient_lost_more_than_half_is_skipped_and_the_next_one_fits(caplog) -> None:
    run = Run(saturation="skip")
    for _ in range(3):
        run.step(1.0)
    before = run.weights()
    run.step(1e4)
    assert run.train.skipped_steps == 1 and same(run.weights(), before)
    assert any("the step is skipped" in message for message in said(caplog))
    run.step(1e4)
    assert run.train.skipped_steps == 1 and not same(run.weights(), before)
    assert (run.train.steps, len(run.optimizer.state)) == (4, 0)


def test_a_micro_batch_before_the_last_one_counts(caplog) -> None:
    run = Run(saturation="skip")
    for _ in range(3):
        run.step(1.0)
    run.step(1e4, 1e4)
    assert run.train.skipped_steps == 1


def test_a_dynamic_loss_scale_stays_and_a_step_that_is_not_finite_is_undone_as_before() -> None:
    run = Run(saturation="skip", loss_scale="dynamic")
    for _ in range(3):
        run.step(1.0)
    run.step(1e4)
    assert run.train.skipped_steps == 1 and run.train.loss_scale == 2.0**16
    histories = scaling_state(run.model).state_dict()
    run.step(float("inf"))
    assert run.train.skipped_steps == 2 and run.train.loss_scale == 2.0**15
    assert same(histories, scaling_state(run.model).state_dict())
    run.step(1e4)
    assert run.train.skipped_steps == 2, "the scale has followed the first of them"


def test_another_setting_is_an_error() -> None:
    with pytest.raises(ValueError, match="saturation expects None or 'skip', got 'undo'"):
        Run(saturation="undo")
