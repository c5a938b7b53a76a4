"""Weights that are written through .data, which raises no version counter: training reads what was written."""

from __future__ import annotations

from typing import Any, Iterable, Iterator

import numpy as np
import pytest
import torch
from called_ops import CalledOps
from fp8_reference import Noise, to_numpy
from interpreted import interpreted
from torch import nn
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile.kernels.delayed_scaling import DEQUANT, QUANT, cast_delayed
from fp8_compile.kernels.fingerprint import sample_offsets
from fp8_compile.kernels.gpu import quantize_many, tile
from fp8_compile.scaling import weight_cache
from fp8_compile.scaling.cached_weight import CachedWeight
from fp8_compile.scaling.weight_cache import WeightCache
from fp8_compile.scaling.weight_sampler import Sampler


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))


class Average:
    """The methods of diffusers' ``EMAModel`` that write to a model, as they are written there."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shadow_params = [param.clone().detach() * -0.75 for param in parameters]

    def store(self, parameters: Iterable[nn.Parameter]) -> None:
        self.temp_stored_params = [param.detach().cpu().clone() for param in parameters]

    def copy_to(self, parameters: Iterable[nn.Parameter]) -> None:
        for s_param, param in zip(self.shadow_params, list(parameters)):
            param.data.copy_(s_param.to(param.device).data)

    def restore(self, parameters: Iterable[nn.Parameter]) -> None:
        for c_param, param in zip(self.temp_stored_params, parameters):
            param.data.copy_(c_param.data)


def gradients(run: Any, model: nn.Module, x: torch.Tensor) -> dict[str, np.ndarray]:
    model.zero_grad()
    run(x).square().sum().backward()
    return {name: to_numpy(parameter.grad) for name, parameter in model.named_parameters()}


def noises(cached: bool) -> Iterator[tuple[str, Noise, WeightCache | None]]:
    """The noise of the gradients of each training pass, two for every optimizer step, with swaps in between."""
    torch._dynamo.reset()
    model, generator = new_model(), torch.Generator().manual_seed(1)
    compiled, average = torch.compile(model, backend="fp8"), Average(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    fp8_compile.attach(compiled, optimizer, weight_cache=cached)

    def measured(when: str) -> tuple[str, Noise, WeightCache | None]:
        x = torch.randn(64, 32, generator=generator)
        exact = gradients(model, model, x)
        return when, Noise(gradients(compiled, model, x), exact), fp8_compile.scaling_state(model).weights

    for step in range(3):
        yield measured(f"step {step}")
        average.store(model.parameters())
        average.copy_to(model.parameters())
        if step:
            yield measured(f"step {step}, average")
        average.restore(model.parameters())
        yield measured(f"step {step}, restored")
        optimizer.step()


def test_gradients_are_as_good_as_without_copies_while_averages_come_and_go() -> None:
    refreshes = []
    for (when, found, cache), (_, reference, none) in zip(noises(cached=True), noises(cached=False), strict=True):
        assert none is None
        found.check(reference)
        refreshes.append((when, cache.refreshes))
    assert refreshes == [
        *(("step 0", 1), ("step 0, restored", 1)),  # restored before anyone looked: nothing has changed
        *(("step 1", 2), ("step 1, average", 3), ("step 1, restored", 4)),
        *(("step 2", 5), ("step 2, average", 6), ("step 2, restored", 7)),
    ]


@pytest.fixture
def warm() -> Iterator[tuple[nn.Module, Any, WeightCache]]:
    """A model that was run once, with an optimizer that lives as long as the test."""
    model = new_model()
    compiled = torch.compile(model, backend="fp8")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp8_compile.attach(compiled, optimizer)
    compiled(torch.randn(16, 32)).sum().backward()
    yield model, compiled, fp8_compile.scaling_state(model).weights
    del optimizer


def is_fresh(entry: CachedWeight, cache: WeightCache) -> bool:
    known = entry.scales
    assert known[DEQUANT] == 1 / known[QUANT] > 0
    expected = cast_delayed(entry.current().detach(), known[QUANT], entry.codes.dtype)
    return torch.equal(entry.codes.view(torch.uint8), expected.view(torch.uint8))


def write_between_samples(weight: torch.Tensor) -> None:
    """To every element that the fingerprint does not depend on."""
    unseen = torch.ones(weight.numel(), dtype=torch.bool)
    unseen[sample_offsets(weight.numel())] = False
    weight.data.view(-1)[unseen] *= -0.5


def versions(cache: WeightCache) -> list[int]:
    return [tensor._version for entry in cache.copies() for tensor in (*entry.tensors(), entry.scales)]


def test_one_of_several_weights_is_quantized_alone(warm) -> None:
    model, compiled, cache = warm
    first, second = cache.copies()
    model[2].weight.data.neg_()
    second_version = second.codes._version
    before = first.codes._version, cache.refreshes
    compiled(torch.randn(16, 32))
    assert (first.codes._version, cache.refreshes) == (before[0], before[1] + 1)
    assert second.codes._version > second_version and is_fresh(first, cache) and is_fresh(second, cache)


@pytest.mark.parametrize("told", [WeightCache.distrust, WeightCache.invalidate], ids=lambda method: method.__name__)
def test_what_samples_miss_is_quantized_once_after_an_inference_pass_or_a_call(warm, told) -> None:
    model, compiled, cache = warm
    x, before = torch.randn(16, 32), cache.refreshes
    for layer in (model[0], model[2]):
        write_between_samples(layer.weight)
    compiled(x)
    assert cache.refreshes == before and not any(is_fresh(entry, cache) for entry in cache.copies()), "a known limit"
    told(cache)
    for _ in range(2):  # two micro-batches
        compiled(x)
        assert cache.refreshes == before + 1 and all(is_fresh(entry, cache) for entry in cache.copies())


def test_an_inference_pass_between_forward_and_backward_changes_nothing() -> None:
    """The weights are the same, and so are their copies; no history gets a second amax of the same step."""
    results = []
    for between in (False, True):
        torch._dynamo.reset()
        model, x = new_model(), torch.linspace(-1, 1, 16 * 32).view(16, 32)
        compiled, optimizer = torch.compile(model, backend="fp8"), torch.optim.SGD(model.parameters(), lr=0.1)
        fp8_compile.attach(compiled, optimizer)
        for _ in range(3):
            loss = compiled(x).sum()
            if between:
                fp8_compile.scaling_state(model).weights.distrust()
            (loss + compiled(x / 2).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.state_dict() | fp8_compile.scaling_state(model).state_dict())
    without, found = results
    assert without.keys() == found.keys() and all(torch.equal(without[key], found[key]) for key in without)


def test_weights_that_a_step_has_marked_are_not_quantized_twice_after_an_inference_pass(warm) -> None:
    _, compiled, cache = warm
    before = cache.refreshes
    cache.invalidate()
    cache.distrust()
    compiled(torch.randn(16, 32))
    assert cache.refreshes == before + 1


class OnGpu:
    """The weights of a warm cache as if they were on a GPU, and the kernel interpreted."""

    def __init__(self, warm: tuple[nn.Module, Any, WeightCache], monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, _, self.cache = warm
        monkeypatch.setattr(weight_cache, "_by_device", lambda weights: ({}, weights))
        self.sampler = Sampler(self.cache)
        self.cache.invalidate()
        self.look()

    def look(self) -> None:
        with interpreted(quantize_many, tile):
            weights = {entry: entry.current() for entry in self.cache.copies()}
            self.cache.ensure_fresh(weights, self.sampler)

    def mark(self) -> None:
        """Make visible what is quantized."""
        for entry in self.cache.copies():
            entry.codes.data.view(torch.uint8).fill_(0x55)
            self.cache.state.tables[entry.at.table].amaxes.data.fill_(tile.NOTHING)

    def fresh(self) -> list[bool]:
        return [is_fresh(entry, self.cache) for entry in self.cache.copies()]

    def amaxes(self) -> list[float]:
        tables = self.cache.state.tables
        return [tables[entry.at.table].amaxes[entry.at.row].item() for entry in self.cache.copies()]


@pytest.fixture
def on_gpu(warm, monkeypatch: pytest.MonkeyPatch) -> OnGpu:
    return OnGpu(warm, monkeypatch)


def test_on_a_gpu_the_kernel_finds_what_was_written_and_the_host_is_not_told(on_gpu: OnGpu) -> None:
    refreshes, first = on_gpu.cache.refreshes, on_gpu.model[0].weight
    assert on_gpu.fresh() == [True, True]
    on_gpu.look()
    before = versions(on_gpu.cache)
    on_gpu.mark()
    with CalledOps() as ops:
        on_gpu.look()
    assert on_gpu.fresh() == [False, False] and not ops.from_the_host
    first.data.mul_(0.5)
    on_gpu.look()
    assert on_gpu.fresh() == [True, False]
    assert on_gpu.amaxes() == [first.abs().max(), tile.NOTHING]
    assert on_gpu.cache.refreshes == refreshes and versions(on_gpu.cache) == before


def test_on_a_gpu_weights_beside_those_that_are_refreshed_are_looked_at(on_gpu: OnGpu) -> None:
    """A frozen layer beside trained ones: each forward has a refresh, of others."""
    frozen, trained = on_gpu.model[0].weight, on_gpu.model[2].weight
    on_gpu.mark()
    frozen.data.mul_(0.5)
    on_gpu.cache.invalidate([trained])
    on_gpu.look()
    assert on_gpu.fresh() == [True, True]


def test_on_a_gpu_nothing_is_checked_right_after_a_refresh_of_all(on_gpu: OnGpu, monkeypatch) -> None:
    def check(weights: Any) -> None:
        raise AssertionError("a second launch")

    monkeypatch.setattr(on_gpu.sampler, "renew_written", check)
    on_gpu.cache.invalidate()
    on_gpu.look()
    assert on_gpu.fresh() == [True, True]


def test_on_a_gpu_all_weights_are_quantized_after_an_inference_pass_and_no_amax_is_recorded(on_gpu: OnGpu) -> None:
    write_between_samples(on_gpu.model[0].weight)
    on_gpu.mark()
    before, refreshes = versions(on_gpu.cache), on_gpu.cache.refreshes
    on_gpu.cache.distrust()
    on_gpu.look()
    assert on_gpu.fresh() == [True, True] and on_gpu.amaxes() == [tile.NOTHING] * 2
    assert versions(on_gpu.cache) == before and on_gpu.cache.refreshes == refreshes + 1


def test_weights_of_graphs_on_both_sides_of_a_break_are_found_written_together() -> None:
    """The second graph's copies are renewed with the first's, by the scales of weights that someone has replaced."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.a(x))
            torch._dynamo.graph_break()
            return self.b(x)

    torch.manual_seed(0)
    model, x = Broken(), torch.randn(16, 32)
    compiled = torch.compile(model, backend=UncompiledBackend())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fp8_compile.attach(compiled, optimizer)
    for _ in range(2):
        compiled(x).square().mean().backward()
        optimizer.step()
    for parameter in model.parameters():
        parameter.data.mul_(5)
    found, exact = to_numpy(compiled(x)), to_numpy(model(x))
    assert "none was ever saturated" in repr(fp8_compile.scaling_state(model))
    assert Noise({"y": found}, {"y": exact}).snr_db()["y"] > 20
