"""``set_precision``: gemms go to high precision and come back in mid-run, and no number is lost on the way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Config, scaling_state, set_precision

D = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def step(run: Any, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = run(x)
    y.square().mean().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return max(float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact)


def high_rows(backend: UncompiledBackend, report: int = -1) -> set[tuple[str, str]]:
    return {(row.gemm, row.reason) for row in backend.reports[report].skipped}


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "nvfp4"])
def test_it_takes_effect_at_the_next_call_and_compiles_once_each_way(recipe: str) -> None:
    model = Model()
    backend = UncompiledBackend(Config(recipe=recipe, keep_last=0))
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(16, D)
    exact = step(model, model, x)
    for _ in range(2):
        assert error(step(compiled, model, x), exact) > 1e-3
    set_precision(compiled, output="high")
    found = step(compiled, model, x)
    assert torch.allclose(found["y"], exact["y"], atol=1e-6) and error(found, exact) > 1e-3
    assert high_rows(backend) == {("output", "set_precision(output='high')")}
    set_precision(model, output="high", grad_input="high", grad_weight="high")
    assert error(step(compiled, model, x), exact) < 1e-5
    graphs = len(backend.reports)
    for gemms in ({}, {"output": "high"}, {}):
        set_precision(model, **gemms)
        step(compiled, model, x)
    assert len(backend.reports) == graphs == 3, "each setting was compiled before"


def test_a_part_of_a_model_is_switched_by_itself() -> None:
    model, backend = Model(), UncompiledBackend(Config(recipe="tensorwise"))
    compiled = torch.compile(model, backend=backend)
    set_precision(model.layers[1], output="high", grad_weight="high")
    step(compiled, model, torch.randn(16, D))
    assert {(row.module, row.gemm) for row in backend.reports[-1].skipped} == {
        ("layers.1.up", "output"),
        ("layers.1.up", "grad_weight"),
    }


def test_blocks_that_are_compiled_one_by_one_are_switched_with_the_model() -> None:
    model, backend = Model(), UncompiledBackend(Config())
    for layer in model.layers:
        layer.compile(backend=backend)
    x = torch.randn(16, D)
    step(model, model, x)
    set_precision(model, grad_weight="high")
    step(model, model, x)
    assert [len(report.rewritten) for report in backend.reports] == [3, 2]


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_a_tensor_that_grew_meanwhile_is_not_saturated_on_the_way_back(target: str) -> None:
    model = Model()
    compiled = torch.compile(model, backend=UncompiledBackend(Config(target=target)))
    x = torch.randn(16, D)
    for _ in range(10):
        step(compiled, model, x)
    set_precision(model, output="high", grad_input="high", grad_weight="high")
    step(compiled, model, x)
    x = 1e4 * x
    set_precision(model)
    exact = step(model, model, x)
    found = step(compiled, model, x)
    assert error(found, exact) < 0.1
    assert not any(row.saturated for row in scaling_state(model).stats())


def test_what_was_recorded_meanwhile_is_kept() -> None:
    model = Model()
    compiled = torch.compile(model, backend=UncompiledBackend(Config()))
    x = torch.randn(16, D)
    step(compiled, model, x)
    set_precision(model, output="high")
    step(compiled, model, x)
    before = scaling_state(model).state_dict()
    set_precision(model)
    after = scaling_state(model).state_dict()
    assert set(before) - set(after) == {"precision"}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_it_is_saved_with_the_scaling_state_and_restored(recipe: str) -> None:
    first, second = Model(), Model()
    set_precision(first, output="high")
    set_precision(first.layers[0], grad_input="high")
    saved = scaling_state(first).state_dict()
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        "precision": [1, 0, 0],
        "layers.0.precision": [0, 1, 0],
    }
    backend = UncompiledBackend(Config(recipe=recipe))
    compiled = torch.compile(second, backend=backend)
    scaling_state(second).load_state_dict(saved)
    step(compiled, second, torch.randn(16, D))
    high = {(row.module, row.gemm) for row in backend.reports[-1].skipped}
    assert high == {("layers.0.up", "grad_input"), ("layers.1.up", "output")}
    set_precision(second)
    scaling_state(second).load_state_dict(scaling_state(second).state_dict() | saved)
    assert scaling_state(second).state_dict().keys() >= saved.keys()


def test_a_training_loop_saves_and_restores_it() -> None:
    results = []
    for high in ("high", None):
        model = Model()
        compiled = torch.compile(model, backend=UncompiledBackend(Config(recipe="tensorwise")))
        train = fp8_compile.attach(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
        set_precision(model, output=high)
        results.append((model, train, copy.deepcopy(train.state_dict())))
    (one, train, with_high), (_, _, without) = results
    train.load_state_dict(without)
    assert not scaling_state(one).state_dict()
    train.load_state_dict(with_high)
    assert scaling_state(one).state_dict()["precision"].tolist() == [1, 0, 0]


def test_wrong_use_is_named() -> None:
    with pytest.raises(ValueError, match="grad_input expects 'high' or None, got 'bf16'"):
        set_precision(Model(), grad_input="bf16")
    with pytest.raises(TypeError, match="set_precision expects a module, got function"):
        set_precision(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"precision=tensor\(\[2, 0, 0\]\); expected three numbers"):
        scaling_state(Model()).load_state_dict({"precision": torch.tensor([2, 0, 0])})
    with pytest.raises(ValueError, match="precision of other, which the model does not have"):
        scaling_state(Model()).load_state_dict({"other.precision": torch.tensor([1, 0, 0])})
