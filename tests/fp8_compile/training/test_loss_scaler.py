"""The loss scale by hand: halves, doubles, counts, never below its floor, and comes back from a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8_compile import LossScaler


def step(scaler: LossScaler, model: nn.Linear, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    scaler.scale(factor * model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def setup(**options: float) -> tuple[LossScaler, nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    return LossScaler("cpu", **options), model, torch.optim.SGD(model.parameters(), lr=0.1)  # type: ignore[arg-type]


def test_the_scale_grows_after_good_steps_halves_after_bad_ones_and_stops_at_the_floor() -> None:
    scaler, model, optimizer = setup(init_scale=2, growth_interval=2)
    seen = []
    for factor in (1, 1, 1, torch.inf, torch.inf, torch.inf, 1):
        before = model.weight.clone()
        step(scaler, model, optimizer, factor)
        assert torch.equal(model.weight, before) == (factor == torch.inf)
        seen.append(scaler.get_scale())
    assert seen == [2, 4, 4, 2, 1, 1, 1]
    assert scaler.skipped_steps == 3


def test_gradients_are_those_of_the_unscaled_loss() -> None:
    scaler, model, optimizer = setup(init_scale=2.0**16)
    step(scaler, model, optimizer)
    assert torch.equal(model.weight.grad, torch.ones(1, 2)), "unscaled by step()"


def test_a_state_comes_back_and_a_plain_grad_scalers_will_do() -> None:
    scaler, model, optimizer = setup(init_scale=8, growth_interval=3)
    for factor in (1, torch.inf, 1, 1):
        step(scaler, model, optimizer, factor)
    other = LossScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert (other.get_scale(), other.skipped_steps, other.get_growth_interval()) == (4, 1, 3)
    for one in (scaler, other):
        step(one, model, optimizer)
    assert other.get_scale() == scaler.get_scale() == 8, "the third good step"
    other.load_state_dict(torch.amp.GradScaler("cpu", init_scale=32.0).state_dict())
    assert other.get_scale() == 32


@pytest.mark.parametrize("options", [{"init_scale": 0.5}, {"floor": 0}, {"growth_factor": 1}, {"growth_interval": 0}])
def test_numbers_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected .*got"):
        LossScaler("cpu", **options)  # type: ignore[arg-type]
