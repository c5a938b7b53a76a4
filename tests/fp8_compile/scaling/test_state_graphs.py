"""Slots among graphs: recompiles, breaks, modes, shared modules, checkpoints, functions and full tables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from instruction_sets import share_kernels
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from uncompiled import UncompiledBackend

from fp8_compile import Config, freeze_scales, scaling_state
from fp8_compile.scaling import graph_slots, layout

D = 32
ROLES = ("input", "weight", "grad_output")


def counts(model: Any) -> dict[str, list[int]]:
    """Slot -> passes it was part of, amaxes that entered."""
    state = scaling_state(model).state_dict()
    return {key.removesuffix(".counts"): value[:2].tolist() for key, value in state.items() if key.endswith(".counts")}


def slots_of(*modules: str) -> set[str]:
    return {f"{module}#0.{role}" for module in modules for role in ROLES}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)


def compiled_with(model: Any, **options: Any) -> tuple[Callable[..., Any], UncompiledBackend]:
    backend = UncompiledBackend(Config(**options))
    return torch.compile(model, backend=backend), backend


def snr(actual: Tensor, expected: Tensor) -> float:
    noise = (actual.double() - expected.double()).square().sum()
    return float(10 * torch.log10(expected.double().square().sum() / noise).detach())


# --- one model, several graphs


def test_a_recompile_for_another_batch_size_goes_on_with_the_same_slots() -> None:
    model = nn.Sequential(nn.Linear(D, 48), nn.Tanh(), nn.Linear(48, D))
    compiled, backend = compiled_with(model)
    for tokens in (4, 6, 9, 4):
        compiled(torch.randn(tokens, D)).sum().backward()
    assert len(backend.reports) == 2
    assert counts(model) == {slot: [4, 4] for slot in slots_of("0", "2")}


def test_evaluation_in_any_mode_changes_nothing_and_training_goes_on() -> None:
    model = nn.Sequential(nn.Linear(D, 48), nn.Dropout(0.1), nn.Linear(48, D))
    compiled, backend = compiled_with(model)
    compiled(torch.randn(8, D)).sum().backward()
    before = scaling_state(model).state_dict()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = compiled(torch.randn(8, D))
            compiled(1000 * torch.randn(8, D))
        assert y.isfinite().all() and equal(scaling_state(model).state_dict(), before), mode
    model.train()
    compiled(torch.randn(8, D)).sum().backward()
    assert counts(model) == {slot: [2, 2] for slot in slots_of("0", "2")}
    assert {row.gemm for row in backend.reports[-1].rows} == {"output"}, "evaluation had graphs of its own"


def test_a_model_that_is_evaluated_first_remembers_nothing_of_it() -> None:
    model = nn.Linear(D, D, bias=False)
    compiled, _ = compiled_with(model)
    with torch.no_grad():
        batches = [factor * torch.randn(8, D) for factor in (1, 10, 0.1)]
        first = [compiled(x) for x in batches]
        again = [compiled(x) for x in reversed(batches)]
    assert all(torch.equal(one, two) for one, two in zip(first, reversed(again))), "whatever came before"
    assert counts(model) == {}
    x = torch.randn(8, D)
    compiled(x).sum().backward()
    assert counts(model) == {slot: [1, 1] for slot in slots_of("")}
    assert scaling_state(model).state_dict()["#0.input.amax_history"].max() == x.abs().max()


def test_every_micro_batch_of_an_accumulated_step_counts() -> None:
    model = nn.Linear(D, D)
    compiled, _ = compiled_with(model)
    batches = [factor * torch.randn(8, D) for factor in (1.0, 5.0, 2.0)]
    for x in batches:
        (compiled(x).square().mean() / 3).backward()
    state = scaling_state(model).state_dict()
    assert state["#0.input.amax_history"][:3].tolist() == [x.abs().max().item() for x in batches]
    assert set(map(tuple, counts(model).values())) == {(3, 3)}


def test_two_forwards_before_their_backwards_count_twice_and_give_their_own_gradients() -> None:
    model = nn.Linear(D, D, bias=False)
    compiled, _ = compiled_with(model)
    small, large = torch.randn(8, D), 100 * torch.randn(8, D)
    first, second = compiled(small), compiled(large)
    (grad,) = torch.autograd.grad(first, model.weight, torch.ones_like(first))
    assert snr(grad, torch.ones(8, D).T @ small) > 20, "each backward reads the scales of its own forward"
    second.backward(torch.ones_like(second))
    assert counts(model) == {slot: [2, 2] for slot in slots_of("")}


def test_looking_at_the_state_between_forward_and_backward_is_harmless() -> None:
    model = nn.Linear(D, D)
    compiled, _ = compiled_with(model)
    for step in range(2):
        y = compiled(torch.randn(8, D))
        seen = counts(model)
        assert seen["#0.input"] == [step + 1, step + 1] and seen["#0.grad_output"] == [step, step]
        y.sum().backward()
    assert counts(model) == {slot: [2, 2] for slot in slots_of("")}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Broken(nn.Module):
    """Blocks with a graph break after each: Dynamo compiles ``Block.forward``, not the loop."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block((1 + index) * x)
            torch._dynamo.graph_break()
        return x


def test_blocks_that_share_a_forward_after_a_break_have_slots_of_their_own() -> None:
    model = Broken(3)
    compiled, _ = compiled_with(model)
    for _ in range(2):
        compiled(torch.randn(8, D)).sum().backward()
    names = [f"blocks.{index}.layer" for index in range(3)]
    assert counts(model) == {slot: [2, 2] for slot in slots_of(*names)}
    state = scaling_state(model).state_dict()
    assert len({state[f"{name}#0.weight.scale"].item() for name in names}) == 3
    assert len({state[f"{name}#0.input.scale"].item() for name in names}) == 3


def test_more_blocks_than_dynamos_recompile_limit_stay_in_fp8() -> None:
    blocks = 5
    model = Broken(blocks)
    with torch._dynamo.config.patch(recompile_limit=3):
        compiled, backend = compiled_with(model)
        x = torch.randn(8, D)
        for _ in range(2):
            compiled(x).sum().backward()
        with torch.no_grad():
            compiled(x)
    assert len(backend.reports) == 3, "the first block, whose input has no gradient; all others; evaluation"
    assert all(row.rewritten for report in backend.reports for row in report.rows)
    names = [f"blocks.{index}.layer" for index in range(blocks)]
    assert counts(model) == {slot: [2, 2] for slot in slots_of(*names)}


# --- modules and weights that are used more than once


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(100 * torch.tanh(self.layer(x)))


def test_a_module_called_twice_has_a_slot_for_each_call_and_one_for_its_weight() -> None:
    model = Twice()
    compiled, _ = compiled_with(model)
    compiled(torch.randn(8, D)).sum().backward()
    expected = ["layer#0.input", "layer#0.weight", "layer#0.grad_output", "layer#1.input", "layer#1.grad_output"]
    assert counts(model) == {slot: [1, 1] for slot in expected}
    state = scaling_state(model).state_dict()
    assert state["layer#1.input.amax_history"][0] > 10 * state["layer#0.input.amax_history"][0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_tied_weights_are_quantized_once_and_have_one_slot() -> None:
    model = Tied()
    compiled, _ = compiled_with(model)
    for _ in range(2):
        compiled(torch.randn(8, D)).sum().backward()
    assert counts(model) == {slot: [2, 2] for slot in slots_of("a", "b") - {"b#0.weight"}}


# --- activation checkpointing


class Checkpointed(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(D, 64), nn.Linear(64, D), recompute

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x))


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_a_recomputed_block_counts_once_and_has_the_same_gradients(target: str) -> None:
    found = []
    for recompute in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Checkpointed(recompute)
        compiled, _ = compiled_with(model, target=target)
        for step in range(3):
            compiled((1 + step) * torch.randn(16, D)).square().sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        found.append({**scaling_state(model).state_dict(), **gradients})
        assert counts(model) == {slot: [3, 3] for slot in slots_of("up", "down")}
    assert equal(*found)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_compiled_model_counts_each_pass_once(reentrant: bool) -> None:
    """A reentrant one runs forward without gradients first: then the second run is the one that counts."""
    model = nn.Sequential(nn.Linear(D, D, bias=False))
    compiled, _ = compiled_with(model)
    for factor in (1, 1, 1000, 1000):
        x = (factor * torch.randn(8, D)).requires_grad_()
        y = checkpoint(compiled, x, use_reentrant=reentrant)
        y.sum().backward()
    found = counts(model)
    assert found["0#0.grad_output"] == [4, 4]
    assert found["0#0.input"] == [4, 4]
    assert snr(y, model(x)) > 20, "the scale has followed the jump"


# --- functions


def test_a_compiled_function_has_the_state_of_the_module_it_runs() -> None:
    model = nn.Linear(D, D)

    def step(x: Tensor) -> Tensor:
        return model(x).square().mean()

    compiled, _ = compiled_with(step)
    compiled(torch.randn(8, D)).backward()
    assert scaling_state(compiled) is scaling_state(step) is scaling_state(model)
    assert counts(compiled) == {slot: [1, 1] for slot in slots_of("")}


def test_functions_made_alike_for_two_models_keep_them_apart() -> None:
    def make(model: nn.Module) -> Callable[..., Tensor]:
        def step(x: Tensor) -> Tensor:
            return model(x).square().mean()

        return compiled_with(step)[0]

    models = [nn.Linear(D, D), nn.Linear(D, D)]
    steps = [make(model) for model in models]
    for step, factor in zip(steps, (1, 1000)):
        step(factor * torch.randn(8, D)).backward()
    assert [counts(model) for model in models] == [{slot: [1, 1] for slot in slots_of("")}] * 2
    scales = [scaling_state(model).state_dict()["#0.input.scale"] for model in models]
    assert scales[0] > 100 * scales[1]
    assert [scaling_state(step) is scaling_state(model) for step, model in zip(steps, models)] == [True, True]


class Trainer:
    """Holds a model and is none."""

    def __init__(self, model: nn.Module, backend: Any) -> None:
        self.model = model
        self.step = torch.compile(self._step, backend=backend)

    def _step(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()


def test_two_objects_whose_methods_are_compiled_keep_their_models_apart() -> None:
    backend = UncompiledBackend()
    trainers = [Trainer(nn.Linear(D, D), backend) for _ in range(2)]
    for trainer, factor in zip(trainers, (1, 1000)):
        trainer.step(factor * torch.randn(8, D)).backward()
    histories = [
        [tensor for key, tensor in scaling_state(trainer.model).state_dict().items() if key.endswith("input.counts")]
        for trainer in trainers
    ]
    assert [[count[:2].tolist() for count in one] for one in histories] == [[[1, 1]], [[1, 1]]]


def test_a_function_of_two_models_runs_one_code_with_the_state_of_each_pair() -> None:
    def step(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return second(torch.tanh(first(x))).square().mean()

    compiled, backend = compiled_with(step)
    one, two, three = (nn.Linear(D, D) for _ in range(3))
    compiled(one, two, torch.randn(8, D)).backward()
    compiled(one, three, torch.randn(8, D)).backward()
    assert len(backend.reports) == 1, "the models look the same: the code is given the state of those it runs"
    runners = backend.codes[0]._runners.values()
    assert len({id(runner.state) for runner in runners}) == 2
    assert snr(compiled(one, three, torch.ones(8, D)), step(one, three, torch.ones(8, D))) > 10


def test_frozen_scales_of_a_function_of_two_models_are_used_at_the_next_call() -> None:
    def run(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return second(torch.tanh(first(x)))

    compiled, backend = compiled_with(run)
    one, two, x = nn.Linear(D, D), nn.Linear(D, D), torch.randn(8, D)
    compiled(one, two, x).sum().backward()
    with torch.no_grad():
        compiled(one, two, x)
        before = len(backend.reports)
        freeze_scales(compiled)
        compiled(one, two, 100 * x)
    assert len(backend.reports) == before + 1
    assert "(frozen) was saturated in 1 of 1 steps" in repr(scaling_state(compiled))


# --- tables


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_a_graph_that_needs_more_slots_than_foreseen_gets_another_page(
    monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(graph_slots, "SLOTS_PER_MATMUL", 1)
    monkeypatch.setattr(graph_slots, "_matmuls", lambda gm: 0)
    monkeypatch.setattr(layout, "LEAST_ROWS", 8)  # where there are twelve
    model = nn.Sequential(*(nn.Linear(D, D) for _ in range(6)))
    compiled, backend = compiled_with(model, target=target)
    for _ in range(3):
        model.zero_grad()
        x = torch.randn(16, D)
        y = compiled(x)
        y.sum().backward()
    tables = scaling_state(model).tables
    directions = [table.kind.direction for table in tables]
    assert directions.count("forward") > 1
    assert counts(model) == {slot: [3, 3] for slot in slots_of(*map(str, range(6)))}
    assert len(counts(model)) == sum(len(table.slots) for table in tables), "each slot lies in one table"
    assert len(backend.reports) == 1 and snr(y, model(x)) > 10
    gradient = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert snr(gradient, model[0].weight.grad) > 5


# --- caches

SCRIPT = """
import sys
import torch
from torch import nn
from fp8_compile import Backend, scaling_state

torch.manual_seed(0)
model, backend = nn.Sequential(nn.Linear(32, 32)), Backend()
compiled = torch.compile(model, backend=backend)
for step in range(3):
    loss = compiled((1 + step) * torch.randn(16, 32)).square().sum()
    loss.backward()
numbers = [loss.item(), model[0].weight.grad, scaling_state(model).state_dict()]
torch.save([backend.reports[0].cache, *numbers], sys.argv[1])
"""


def test_code_from_a_warm_cache_has_the_slots_it_was_compiled_with(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    share_kernels(tmp_path / "cache")
    environ.pop("FP8_COMPILE_DUMP", None)
    found = []
    for name in ("first.pt", "second.pt"):
        command = [sys.executable, "script.py", name]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(torch.load(tmp_path / name, weights_only=True))
    (first, *numbers, state), (second, *again, state_again) = found
    assert (first, second) == ("miss", "hit")
    assert numbers[0] == again[0] and torch.equal(numbers[1], again[1])
    assert len(state) == 12 and equal(state, state_again)
    assert all(value[:2].tolist() == [3, 3] for key, value in state.items() if key.endswith("counts"))
