"""What is known of a module is kept in one place, and goes with the module."""

from __future__ import annotations

import gc
import weakref
from typing import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Config, scaling_state
from fp8_compile.scaling.model_state import model_state, request


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Asker:
    """A part of a training loop."""


def test_a_module_has_one_state_and_takes_it_along_when_it_goes() -> None:
    model = nn.Linear(32, 32)
    state = weakref.ref(model_state(model))
    assert state() is model_state(model) and model_state(nn.Linear(32, 32)) is not state()
    scaling = weakref.ref(scaling_state(model))
    assert model_state(model).scaling is scaling()
    del model
    gc.collect()
    assert state() is None and scaling() is None


def test_what_any_training_loop_asks_for_is_done_until_all_of_them_are_gone() -> None:
    trunk = nn.Linear(32, 32)
    models, askers = [nn.Sequential(trunk), nn.Sequential(trunk)], [Asker(), Asker()]
    requests, state = model_state(trunk).requests, scaling_state(trunk)
    for model, asker in zip(models, askers):
        request(model, asker).cached = True
    request(models[1], askers[1]).held = True
    assert requests.cached and requests.held and state.held and state.weights is not None
    request(models[1], askers[1]).held = False
    assert requests.cached and not requests.held
    askers.pop()
    del asker
    assert requests.cached and state.weights is not None
    askers.pop()
    assert not requests.cached and state.weights is None


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_compiled_wrapper_of_data_parallelism_has_the_loss_scale_of_its_module(one_rank: None) -> None:
    model = Model()
    compiled = torch.compile(DistributedDataParallel(model), backend=UncompiledBackend(Config(recipe="tensorwise")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = fp8_compile.attach(compiled, optimizer, loss_scale=1024.0)
    compiled(torch.randn(16, 32)).sum().backward()
    assert [scale.value for scale in model_state(model).graph_loss_scales] == [1024.0]
    optimizer.step()
    assert train.steps == 1
