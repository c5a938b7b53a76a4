"""One code for all modules that are treated alike, blocks compiled one by one, models of a sweep; a state for each."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from called_ops import CalledOps
from torch import Tensor, fx, nn
from uncompiled import NO_CACHE, UncompiledBackend

import fp8_compile
from fp8_compile import Config, scaling_state
from fp8_compile.backend.graph import compile_graph
from fp8_compile.backend.interpret import run_uncompiled
from fp8_compile.scaling import model_state, weight_cache
from fp8_compile.scaling.find_state import states_within
from fp8_compile.scaling.state import ScalingState
from fp8_compile.torch_internals.aot import named_inputs

D = 32


class Block(nn.Module):
    def __init__(self, width: int = 2 * D) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, width), nn.Linear(width, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * torch.sigmoid(self.gate(x)))


def stack(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, D), *(Block() for _ in range(blocks)))


def compile_each(model: nn.Sequential, *backends: Any) -> None:
    """Every block by itself, the first module (an embedding, as it were) not at all."""
    for index, block in enumerate(model[1:]):
        block.compile(backend=backends[index % len(backends)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, bad: int | None = None) -> list[Tensor]:
    generator, losses = torch.Generator().manual_seed(1), []
    for step in range(steps):
        x = torch.randn(16, D, generator=generator) * (float("inf") if step == bad else 1 + step % 3)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("attached", [False, True])
def test_blocks_that_share_code_train_as_blocks_with_code_of_their_own_bit_for_bit(attached: bool) -> None:
    results = []
    for shared in (True, False):
        torch._dynamo.reset()
        model, backends = stack(), [UncompiledBackend() for _ in range(1 if shared else 4)]
        compile_each(model, *backends)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if attached:
            fp8_compile.attach(model, optimizer, loss_scale="dynamic")
        losses = train(model, optimizer, 50, bad=20 if attached else None)
        states = {name: state.state_dict() for name, state in states_within(model).items() if name}
        results.append((losses, list(model.parameters()), states, sum(len(one.reports) for one in backends)))
    (losses, weights, states, codes), (own_losses, own_weights, own_states, own_codes) = results
    assert (codes, own_codes) == (1, 4)
    assert all(torch.equal(a, b) or (a.isnan() and b.isnan()) for a, b in zip(losses, own_losses, strict=True))
    assert all(map(torch.equal, weights, own_weights))
    assert list(states) == ["1", "2", "3", "4"] == list(own_states)
    for name, state in states.items():
        assert state.keys() == own_states[name].keys() and len(state) == 4 * 6
        assert all(torch.equal(row, own_states[name][key]) for key, row in state.items())
    assert len({states[name]["up#0.input.scale"].item() for name in states}) == 4, "each block has its own"


def test_two_kinds_of_block_and_other_widths_have_a_code_each() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    kinds = [Block(), Gated(), Block(), Gated(), Block(4 * D), Block(4 * D)]
    model, backend = nn.Sequential(nn.Linear(D, D), *kinds), UncompiledBackend()
    compile_each(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, 3)
    assert len(backend.reports) == 3 and len(states_within(model)) == 6
    assert all("none was ever saturated" in repr(state) for state in states_within(model).values())


def test_a_block_that_all_layers_share_has_one_state_and_one_code() -> None:
    """As in ALBERT."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    shared, backend = Block(), UncompiledBackend()
    model = nn.Sequential(nn.Linear(D, D), *(shared for _ in range(3)))
    shared.compile(backend=backend)
    train(model, torch.optim.SGD(model.parameters(), lr=0.05), 3)
    assert len(backend.reports) == 1
    (state,) = states_within(model).values()
    assert state.state_dict()["up#0.input.counts"][:2].tolist() == [9, 9]


def test_blocks_that_patterns_treat_differently_share_code_with_those_that_are_treated_alike() -> None:
    torch._dynamo.reset()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(12))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                torch._dynamo.graph_break()
                x = block(x)
            return x

    model, backend = Model(), UncompiledBackend(Config(exclude=("blocks.10*", "blocks.11*")))
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(torch.randn(16, D, requires_grad=True)).sum().backward()
    with_matmuls = [report for report in backend.reports if report.rows]
    assert [bool(report.rewritten) for report in with_matmuls] == [True, False], "ten blocks, two blocks"
    names = {str(slot).partition("#")[0] for slot, _ in scaling_state(model).slots()}
    assert names == {f"blocks.{index}.{layer}" for index in range(10) for layer in ("up", "down")}


def test_a_model_that_is_attached_does_not_run_the_code_of_one_that_is_not() -> None:
    torch._dynamo.reset()
    backend, models = UncompiledBackend(), [stack(1)[1] for _ in range(4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    compiled = [torch.compile(model, backend=backend) for model in models]
    for index in (2, 3):
        fp8_compile.attach(models[index], optimizers[index], loss_scale=8.0)
    for model, optimizer in zip(compiled, optimizers):
        train(model, optimizer, 2)
    assert len(backend.reports) == 2
    assert [scaling_state(model).weights is not None for model in models] == [False, False, True, True]
    assert [scaling_state(model).gradient_unit for model in models] == [1.0, 1.0, 8.0, 8.0]


def test_parameters_that_are_replaced_go_on_with_the_state_of_their_module() -> None:
    torch._dynamo.reset()
    model, backend = stack(1)[1], UncompiledBackend()
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        compiled(torch.randn(16, D)).sum().backward()
        model.up.weight = nn.Parameter(torch.randn_like(model.up.weight))
        gc.collect()
    parameters = {f"_orig_mod.{name}": torch.randn_like(one) for name, one in model.named_parameters()}
    torch.func.functional_call(compiled, parameters, torch.ones(4, D))
    assert scaling_state(model).state_dict()["up#0.input.counts"][:2].tolist() == [3, 3]
    (code,) = {id(one): one for one in backend.codes if one.trains}.values()
    assert len(code._runners) <= 1, "state goes with the parameters that it was found by"


def test_parameters_that_are_replaced_after_the_training_loop_has_ended_run_the_code_that_is_there() -> None:
    torch._dynamo.reset()
    model, backend = stack(1)[1], UncompiledBackend()
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.05)
    training = fp8_compile.attach(compiled, optimizer, loss_scale=8.0)
    train(compiled, optimizer, 2)
    training.detach()
    model.load_state_dict({name: 0.5 * one for name, one in model.state_dict().items()}, assign=True)
    x = torch.randn(16, D)
    found = compiled(x)
    found.square().mean().backward()
    gradient = model.up.weight.grad.clone()
    model.zero_grad()
    model(x).square().mean().backward()
    assert len(backend.reports) == 1
    assert 20 * torch.log10(model(x).norm() / (found - model(x)).norm()) > 20
    assert 20 * torch.log10(gradient.norm() / (gradient - model.up.weight.grad).norm()) > 10


def test_thirty_models_leave_nothing_behind() -> None:
    torch._dynamo.reset()
    backend = UncompiledBackend()
    watched: list[weakref.ref[Any]] = []

    def sweep(models: int) -> None:
        for _ in range(models):
            model = stack(2)
            compile_each(model, backend)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            fp8_compile.attach(model, optimizer, loss_scale="dynamic")
            train(model, optimizer, 2)
            watched.extend(map(weakref.ref, [*states_within(model).values(), *model.modules()]))
            del model, optimizer

    sweep(2)
    collect()
    before = [len(model_state._states), len(weight_cache._caches), len(weight_cache._by_weight), count_states()]
    sweep(28)
    collect()
    assert len(watched) > 300 and not any(one() is not None for one in watched)
    after = [len(model_state._states), len(weight_cache._caches), len(weight_cache._by_weight), count_states()]
    assert after == before and len(backend.reports) == 1
    assert all(not code._runners and not code._watched for code in backend.codes)


def collect() -> None:
    while gc.collect():  # a parameter that is found to be garbage may only be freed the next time
        pass


def count_states() -> int:
    return sum(isinstance(item, ScalingState) for item in gc.get_objects())


# --- what CUDA graphs rely on


def test_the_state_is_a_static_input_as_parameters_are() -> None:
    torch._dynamo.reset()
    model, static = stack(1)[1], []

    def inner(gm: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Any:
        named = named_inputs(gm.graph)
        positions = {node: index for index, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
        static.append(({positions[node] for node in named.values()}, set(kwargs.get("static_input_idxs", ()))))
        return run_uncompiled(gm, example_inputs, **kwargs)

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return compile_graph(gm, example_inputs, Config(inductor=NO_CACHE), inner_compile=inner)[0]

    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.05)
    fp8_compile.attach(compiled, optimizer, loss_scale=8.0)
    train(compiled, optimizer, 2)
    forward, backward = static
    assert len(forward[0]) == 5 + 5 + 2 * 2 + 2, "two tables; codes and scales of two weights; the loss scale"
    assert forward[0] < forward[1] and backward[0] <= backward[1]


@pytest.mark.parametrize("attached", [False, True])
def test_between_two_runs_nothing_is_called_or_allocated(attached: bool) -> None:
    torch._dynamo.reset()
    model, backend = stack(1)[1], UncompiledBackend()
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.SGD(model.parameters(), lr=0.05)
    if attached:
        fp8_compile.attach(compiled, optimizer, loss_scale=8.0)
    train(compiled, optimizer, 3)
    compiled(torch.randn(16, D))  # copies are renewed after a step
    (code,) = backend.codes
    (runner,) = code._runners.values()
    calls: list[tuple[Any, ...]] = []
    runner.compiled = lambda *args: calls.append(args) or args[:1]
    compiled(torch.randn(16, D))
    arguments = calls[0][: len(calls[0]) - len(runner.inputs)]
    with CalledOps() as called:  # Dynamo compiles nothing under such a mode: the code is called by hand
        for _ in range(3):
            code(*arguments)
    assert len(calls) == 4 and called.called == set()
    assert all(one is other for call in calls for one, other in zip(call, calls[0], strict=True))
