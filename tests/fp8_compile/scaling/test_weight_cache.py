"""FP8 copies of weights are never stale, cost one refresh per step, and change no number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from called_ops import CalledOps
from interpreted import check_same, interpreted
from torch import Tensor, nn
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile.kernels.delayed_scaling import DEQUANT, QUANT, cast_delayed
from fp8_compile.kernels.gpu import quantize_many, tile
from fp8_compile.scaling.cached_weight import CachedWeight
from fp8_compile.scaling.model_state import request
from fp8_compile.scaling.weight_cache import WeightCache
from fp8_compile.training.weight_caching import WeightCaching


class Model(nn.Module):
    """Two graphs (a break between them), a weight that two layers share, an output head, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.third = nn.Linear(32, 32, bias=False)
        self.third.weight = self.first.weight
        self.lm_head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(self.embed(tokens)))))
        torch._dynamo.graph_break()
        return self.lm_head(self.third(x))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(seed))


def trained(model: nn.Module, compiled: Any, steps: int, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(steps):
        loss = nn.functional.cross_entropy(compiled(tokens(step % 2)), tokens(step % 2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def cache_of(model: nn.Module) -> WeightCache:
    cache = fp8_compile.scaling_state(model).weights
    assert cache is not None
    return cache


def check_fresh(entry: CachedWeight, weight: torch.Tensor, cache: WeightCache) -> None:
    """The copy is that of the weight as it is now."""
    known = entry.scales
    assert known[DEQUANT] == 1 / known[QUANT] > 0
    check_same(entry.codes, cast_delayed(weight.detach(), known[QUANT], entry.codes.dtype))


@pytest.mark.parametrize("fused", [False, True])
def test_training_is_the_same_bit_for_bit_with_one_refresh_a_step(fused: bool) -> None:
    results = []
    for cached in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        compiled = torch.compile(model, backend="fp8")
        # Fused optimizers leave version counters as they are.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        training = fp8_compile.attach(compiled, optimizer, weight_cache=cached)
        losses = trained(model, compiled, 4, optimizer)
        results.append((losses, model.state_dict(), fp8_compile.scaling_state(model).state_dict()))
    (losses, *plain), (same_losses, *cached) = results
    assert losses == same_losses and losses[-1] < losses[0]
    slots = {"first#0.weight", "second#0.weight"}
    cache = cache_of(model)
    assert {str(slot) for slot in cache.entries} == slots, "one for the shared weight, none for head and embedding"
    assert cache.refreshes == 4 and training.part(WeightCaching).memory_bytes() == 2 * 32 * 32
    for expected, found in zip(plain, cached):
        shared = [key for key in expected if not key.startswith("third#0.weight")]  # has the slot of the first
        assert set(found) >= set(shared) and all(torch.equal(expected[key], found[key]) for key in shared)


@pytest.fixture
def warm() -> tuple[nn.Module, Any, WeightCache]:
    """A layer that was run once."""
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    request(model).cached = True
    compiled = torch.compile(model, backend="fp8")
    compiled(torch.randn(16, 32)).sum().backward()
    return model, compiled, cache_of(model)


def test_a_weight_changed_behind_the_caches_back_is_noticed(warm) -> None:
    model, compiled, cache = warm
    x, layer = torch.randn(16, 32), model[0]
    saved = copy.deepcopy(model.state_dict())

    def load() -> None:
        model.load_state_dict({key: tensor * 2 for key, tensor in saved.items()})

    def edit() -> None:
        with torch.no_grad():
            layer.weight[3] += 1

    def new_memory() -> None:
        for _ in range(2):  # the second time at the address of the first, if nobody held it
            layer.weight.data = layer.weight.data * 0.5

    def new_parameter() -> None:
        layer.weight = nn.Parameter(torch.randn(48, 32))

    def hidden() -> None:
        layer.weight.data.copy_(torch.randn(48, 32))

    def other_optimizer() -> None:
        torch.optim.SGD(layer.parameters(), lr=1.0, fused=True).step()

    def reset() -> None:
        fp8_compile.scaling_state(model).reset()

    for change in (load, edit, new_memory, new_parameter, hidden, other_optimizer, reset):
        before = cache.refreshes
        change()
        for _ in range(2):  # the second micro-batch finds the copy fresh
            compiled(x).square().sum().backward()
        assert cache.refreshes == before + 1, change.__name__
        (entry,) = [entry for entry in cache.copies() if entry.current() is layer.weight]
        check_fresh(entry, layer.weight, cache)


@pytest.mark.parametrize("hidden", [False, True])
def test_backward_refuses_copies_that_its_forward_did_not_read(warm, hidden: bool) -> None:
    model, compiled, cache = warm
    x = torch.randn(16, 32, requires_grad=True)
    loss = compiled(x).sum()
    with torch.no_grad():
        (model[0].weight.data if hidden else model[0].weight).mul_(2)
    compiled(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_attaching_late_compiles_again_and_copies_stay_fresh_when_detached() -> None:
    backend = fp8_compile.Backend()
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.1)
    x, state = torch.randn(16, 32), fp8_compile.scaling_state(model)
    compiled(x).sum().backward()
    assert state.weights is None
    training = fp8_compile.attach(compiled, optimizer)
    compiled(x).sum().backward()
    cache = cache_of(model)
    assert len(backend.reports) == 2 and cache.refreshes == 1
    training.detach()
    assert state.weights is None
    optimizer.step()
    compiled(x).sum().backward()
    assert len(backend.reports) == 2 and cache.refreshes == 2
    check_fresh(*cache.entries.values(), model[0].weight, cache)


def test_code_from_inductors_cache_reads_the_copies_too() -> None:
    for expected in (("miss", "hit"), ("hit",)):
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32, bias=False))
        backend = fp8_compile.Backend()
        request(model).cached = True
        torch.compile(model, backend=backend)(torch.randn(16, 32)).sum().backward()
        cache = cache_of(model)
        assert backend.reports[0].cache in expected and cache.refreshes == 1
        assert [str(slot) for slot in cache.entries] == ["0#0.weight", "2#0.weight"]
        for entry, layer in zip(cache.entries.values(), (model[0], model[2])):
            check_fresh(entry, layer.weight, cache)


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100"])
def test_the_launch_for_gpus_writes_what_the_cpu_writes(generator, target: str) -> None:
    """In Triton's interpreter: both layouts or the one that is read, slots with and without a history, weights rounded
    by autocast."""
    caches = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False))
        model.load_state_dict({key: torch.full_like(w, 0.5) for key, w in model.state_dict().items()})
        request(model).cached = True
        compiled = torch.compile(model, backend="fp8", options={"target": target})
        compiled(torch.ones(16, 32))
        torch._dynamo.reset()
        caches.append((cache_of(model), model))
    weights = [torch.randn(48, 32, generator=generator), torch.randn(32, 48, generator=generator)]
    (on_cpu, _), (on_gpu, _) = caches
    for cache, _ in caches:
        first, second = cache.entries.values()
        second.via = torch.bfloat16
        state = cache.state
        state.tables[first.at.table].scales[:, first.at.row] = 0  # as if it had no history
    entries = list(on_cpu.entries.values())
    for entry, weight in zip(entries, weights):
        on_cpu.writer.quantize_on_cpu({entry: weight})
    with interpreted(quantize_many, tile):
        on_gpu.writer.quantize_on_gpu(dict(zip(on_gpu.entries.values(), weights)))
    for expected, found in zip(entries, on_gpu.entries.values()):
        check_same(found.codes, expected.codes)
        assert (found.transposed is None) == (target == "cuda:100")
        if found.transposed is not None:
            check_same(found.transposed, expected.transposed)
        table, row = expected.at.table, expected.at.row
        assert torch.equal(found.scales, expected.scales)
        assert on_gpu.state.tables[table].amaxes[row] == on_cpu.state.tables[table].amaxes[row] > 0


def test_a_refresh_after_the_first_steps_copies_nothing_from_the_host(warm) -> None:
    """A copy from the host waits for the device; the first refresh makes what the later ones need."""
    _, _, cache = warm
    stale = {entry: entry.current() for entry in cache.copies()}
    with interpreted(quantize_many, tile):
        cache.writer.quantize_on_gpu(stale)
        with CalledOps() as ops:
            cache.writer.set_scales(stale)
    assert not ops.from_the_host


def test_weights_on_a_gpu_and_on_the_cpu_are_each_quantized_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False))
    request(model).cached = True
    torch.compile(model, backend="fp8")(torch.randn(16, 32)).sum().backward()
    cache = cache_of(model)
    here, there = cache.copies()
    weight, launched = here.current(), []
    monkeypatch.setattr(cache.writer, "quantize_on_gpu", launched.append)
    here.codes.view(torch.uint8).zero_()
    elsewhere = torch.empty(there.codes.shape, device="meta")
    cache._refresh({here: weight, there: elsewhere})
    assert launched == [{there: elsewhere}]
    check_fresh(here, weight, cache)


def test_a_graph_that_is_compiled_after_a_break_does_not_spoil_the_backward_of_the_graph_before() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            return self.second(x)

    model = Broken()
    compiled = torch.compile(model, backend=UncompiledBackend())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fp8_compile.attach(compiled, optimizer)
    for _ in range(2):
        compiled(torch.randn(16, 32, requires_grad=True)).square().mean().backward()
        optimizer.step()
