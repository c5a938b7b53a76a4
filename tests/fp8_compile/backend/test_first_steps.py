"""The first passes of delayed scaling, before any history: nothing saturated, nothing flushed, nothing hidden."""

from __future__ import annotations

import logging
import math
from typing import Any, Callable

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

from fp8_compile import Config, scaling_state
from fp8_compile.backend.runner import FIRST_RUNS

D, HIDDEN, TOKENS = 32, 48, 16
each_target = pytest.mark.parametrize("target", ["cpu", "cuda:90"])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, HIDDEN, bias=False), nn.ReLU(), nn.Linear(HIDDEN, D, bias=False))


def compiled_for(target: str, model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=UncompiledBackend(Config(target=target, **options)), fullgraph=True)


def snr(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    noise = (actual - expected).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(expected.square().sum().item() / noise)


def results(model: Callable[..., Any], x: Tensor, loss_scale: float) -> dict[str, Tensor]:
    """The output and every gradient of one pass."""
    module = getattr(model, "_orig_mod", model)
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y.square().mean() * loss_scale).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    return {"output": y.detach(), "grad_input": x.grad, **gradients}


def check(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    figures = {name: snr(found[name], exact[name]) for name in exact}
    assert figures["output"] > 20 and min(figures.values()) > 12, figures
    assert max(figures.values()) < 60, f"this was not computed in FP8: {figures}"


@each_target
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("loss_scale", [1e-8, 1e6])
def test_the_first_step_is_sound_whatever_the_magnitudes(target: str, magnitude: float, loss_scale: float) -> None:
    model = mlp()
    compiled = compiled_for(target, model)
    x = magnitude * torch.randn(TOKENS, D)
    check(results(compiled, x, loss_scale), results(model, x, loss_scale))


@each_target
def test_the_second_step_has_the_scales_of_the_first(target: str) -> None:
    model = mlp()
    compiled = compiled_for(target, model)
    for seed in range(3):
        x = 1e4 * torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(seed))
        check(results(compiled, x, 1e-8), results(model, x, 1e-8))


@each_target
def test_the_first_inference_is_sound_too(target: str) -> None:
    model = mlp()
    compiled = compiled_for(target, model)
    with torch.no_grad():
        for _ in range(2):
            x = 1e-4 * torch.randn(TOKENS, D)
            assert 20 < snr(compiled(x), model(x)) < 60


@each_target
def test_inference_that_begins_with_zeros_is_sound_when_data_comes(target: str) -> None:
    model = mlp()
    compiled = compiled_for(target, model)
    with torch.no_grad():
        assert not compiled(torch.zeros(TOKENS, D)).any()
        for batch in range(FIRST_RUNS + 3):
            x = 1e-4 * torch.randn(TOKENS, D)
            assert 20 < snr(compiled(x), model(x)) < 60, batch
    assert scaling_state(model).state_dict() == {}, "each batch has its own scales, and leaves none behind"


@each_target
def test_a_layer_that_starts_at_zero_learns(target: str) -> None:
    """Its gradient is not zero; that of the layer before it is, until the weight is not."""
    model = mlp()
    nn.init.zeros_(model[2].weight)
    compiled = compiled_for(target, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, wanted = torch.randn(TOKENS, D), torch.randn(TOKENS, D)
    gradients = []
    for _ in range(4):
        optimizer.zero_grad()
        (compiled(x) - wanted).square().mean().backward()
        found = [layer.weight.grad.clone() for layer in (model[0], model[2])]
        optimizer.zero_grad()
        (model(x) - wanted).square().mean().backward()
        gradients.append((found, [layer.weight.grad.clone() for layer in (model[0], model[2])]))
        for layer, gradient in zip((model[0], model[2]), found):
            layer.weight.grad.copy_(gradient)
        optimizer.step()
    assert not gradients[0][0][0].any(), "no gradient goes through a weight of zeros"
    for step, (found, exact) in enumerate(gradients):
        for gradient, expected in zip(found, exact):
            assert not expected.any() or snr(gradient, expected) > 10, step
    assert gradients[1][0][0].any()


@each_target
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_bad_batch_spoils_its_own_result_and_no_later_one(target: str, bad: float) -> None:
    model = mlp()
    compiled = compiled_for(target, model)
    for _ in range(2):
        results(compiled, torch.randn(TOKENS, D), 1.0)
    before = scaling_state(model).state_dict()
    x = torch.randn(TOKENS, D)
    x[3, 5] = bad
    spoiled = results(compiled, x, 1.0)
    assert not spoiled["output"].isfinite().all()
    assert all(not spoiled[name].isfinite().all() for name in ("0.weight", "2.weight")), "a loss scaler must see it"
    after = scaling_state(model).state_dict()
    for key in before:
        if key.endswith(("scale", "amax_history")) and "weight" not in key:
            assert torch.equal(before[key], after[key]), key
    assert after["0#0.input.counts"][:2].tolist() == [3, 2]
    x = torch.randn(TOKENS, D)
    check(results(compiled, x, 1.0), results(model, x, 1.0))


@each_target
def test_a_bad_first_batch_is_not_finite_and_the_second_is_sound(target: str) -> None:
    model = mlp()
    compiled = compiled_for(target, model)
    x = torch.randn(TOKENS, D)
    bad = x.clone()
    bad[0, 0] = math.inf
    assert not results(compiled, bad, 1e-8)["0.weight"].isfinite().all()
    assert scaling_state(model).state_dict()["0#0.input.scale"] == 0
    check(results(compiled, x, 1e-8), results(model, x, 1e-8))


@each_target
def test_an_overflow_in_backward_alone_reaches_the_gradients(target: str) -> None:
    model = mlp()
    compiled = compiled_for(target, model)
    results(compiled, torch.randn(TOKENS, D), 1.0)
    before = scaling_state(model).state_dict()["2#0.grad_output.amax_history"]
    model.zero_grad()
    y = compiled(torch.randn(TOKENS, D))
    gradient = torch.randn_like(y)
    gradient[2, 7] = math.inf
    y.backward(gradient)
    assert y.isfinite().all()
    assert not model[0].weight.grad.isfinite().all() and not model[2].weight.grad.isfinite().all()
    assert torch.equal(scaling_state(model).state_dict()["2#0.grad_output.amax_history"], before)


# --- GPU targets: an uncompiled twin of the graph looks at the tensors first


def test_a_tensor_that_stays_zero_is_named_once_and_the_compiled_code_takes_over(caplog: Any) -> None:
    model = mlp()
    nn.init.zeros_(model[2].weight)  # never trained here
    compiled = compiled_for("cuda:90", model)
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        for _ in range(FIRST_RUNS):
            results(compiled, torch.randn(TOKENS, D), 1.0)
        assert not caplog.records
        for _ in range(3):
            results(compiled, torch.randn(TOKENS, D), 1.0)
    (record,) = caplog.records
    message = record.getMessage()
    assert "2#0.weight" in message and "0#0.grad_output" in message and str(FIRST_RUNS) in message
    assert "input" not in message and "0#0.weight" not in message
    state = scaling_state(model).state_dict()
    assert state["2#0.weight.scale"] == 1 and state["2#0.weight.counts"][:2].tolist() == [FIRST_RUNS + 3] * 2


def test_a_slot_that_was_given_up_takes_the_scale_of_the_first_amax_that_comes() -> None:
    model = mlp()
    nn.init.zeros_(model[2].weight)
    compiled = compiled_for("cuda:90", model)
    for _ in range(FIRST_RUNS + 1):
        results(compiled, torch.randn(TOKENS, D), 1.0)
    with torch.no_grad():
        model[2].weight.copy_(1e-5 * torch.randn(D, HIDDEN))
    for _ in range(5):  # the weight, then the gradient behind it, then the one before it: a pass each
        x = torch.randn(TOKENS, D)
        found = results(compiled, x, 1.0)
    exact = results(model, x, 1.0)
    assert snr(found["output"], exact["output"]) > 20
    assert snr(found["0.weight"], exact["0.weight"]) > 10


def test_on_a_cpu_a_slot_without_history_is_looked_at_for_as_long_as_it_takes(caplog: Any) -> None:
    model = mlp()
    nn.init.zeros_(model[2].weight)
    compiled = compiled_for("cpu", model)
    with caplog.at_level(logging.WARNING, "fp8_compile"):
        for _ in range(FIRST_RUNS + 2):
            results(compiled, torch.randn(TOKENS, D), 1.0)
    assert not caplog.records
    with torch.no_grad():
        model[2].weight.copy_(1e-5 * torch.randn(D, HIDDEN))
    x = torch.randn(TOKENS, D)
    check(results(compiled, x, 1.0), results(model, x, 1.0))
