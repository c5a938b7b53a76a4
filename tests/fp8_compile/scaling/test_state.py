"""What delayed scaling remembers: plain tensors that can be saved, loaded, refused, forgotten."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

from fp8_compile import Config, scaling_state
from fp8_compile.scaling.state import ScalingState

D = 32
ROOT = Path(__file__).parents[3]
SLOTS = {f"{layer}#0.{role}" for layer in ("0", "2") for role in ("input", "weight", "grad_output")}
FIELDS = ("scale", "amax_history", "counts", "largest")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 48), nn.Tanh(), nn.Linear(48, D))


def trained(steps: int = 3, **options: Any) -> tuple[nn.Module, Callable[..., Any]]:
    """A model after some passes, whose scales are not those of one batch alone."""
    torch._dynamo.reset()
    model = mlp()
    compiled = torch.compile(model, backend=UncompiledBackend(Config(**options)))
    for step in range(steps):
        compiled((1 + step) * torch.randn(8, D)).square().sum().backward()
    return model, compiled


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)


def spoiled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state of the same slots with other numbers."""
    return {key: tensor * 2 if key.endswith(("scale", "history")) else tensor for key, tensor in state.items()}


# --- what it is


def test_the_state_is_plain_tensors_under_readable_names() -> None:
    model, _ = trained()
    state = scaling_state(model).state_dict()
    assert set(state) == {f"{slot}.{field}" for slot in SLOTS for field in FIELDS}
    assert all(type(tensor) is Tensor and not tensor.requires_grad for tensor in state.values())
    weight = model[0].weight.abs().max()
    assert state["0#0.weight.amax_history"].tolist() == [weight.item()] * 3 + [0.0] * 13
    assert state["0#0.weight.scale"] == weight.reciprocal() * 448
    assert state["0#0.weight.counts"].tolist() == [3, 3, *[0] * 5], "passes, entered, and nothing lost"
    assert state["0#0.input.scale"] == (4 * state["0#0.input.amax_history"].max()).reciprocal() * 448, "a margin of 2"
    assert state["0#0.grad_output.scale"] == (64 * state["0#0.grad_output.amax_history"].max()).reciprocal() * 57344
    assert (state["0#0.weight.largest"], state["0#0.grad_output.largest"]) == (448, 57344)


def test_a_state_dict_is_a_copy_that_later_passes_leave_alone() -> None:
    model, compiled = trained()
    state = scaling_state(model).state_dict()
    kept = {key: tensor.clone() for key, tensor in state.items()}
    compiled(100 * torch.randn(8, D)).sum().backward()
    assert equal(state, kept) and not equal(scaling_state(model).state_dict(), kept)


def test_the_plain_and_the_compiled_module_have_one_state_and_its_twin_another() -> None:
    model, compiled = trained()
    assert scaling_state(model) is scaling_state(compiled)
    other, _ = trained(steps=1)
    assert scaling_state(other) is not scaling_state(model)


def test_the_models_own_state_dict_and_buffers_do_not_change() -> None:
    model, compiled = trained()
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert list(model.state_dict()) == names and not list(model.buffers())
    assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in names]
    scaling_state(model).load_state_dict(scaling_state(model).state_dict())
    assert list(model.state_dict()) == names


def test_something_that_is_not_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match="expects a module or a compiled function, got int"):
        scaling_state(3)  # type: ignore[arg-type]


# --- saved and loaded


def through_torch_save(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def through_safetensors(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    safetensors.save_file(state, folder / "state.safetensors")
    return safetensors.load_file(folder / "state.safetensors")


def through_distributed_checkpoint(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    dcp.save({"scaling": state}, checkpoint_id=folder / "dcp", no_dist=True)
    empty = {"scaling": {key: torch.full_like(tensor, -5) for key, tensor in state.items()}}
    dcp.load(empty, checkpoint_id=folder / "dcp", no_dist=True)
    return empty["scaling"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "through", [through_torch_save, through_safetensors, through_distributed_checkpoint], ids=lambda f: f.__name__
)
def test_a_state_comes_back_from_a_file_bit_for_bit(through: Callable[..., Any], tmp_path: Path) -> None:
    model, compiled = trained()
    state = scaling_state(model).state_dict()
    loaded = through(state, tmp_path)
    assert equal(loaded, state)
    compiled(50 * torch.randn(8, D)).sum().backward()
    scaling_state(model).load_state_dict(loaded)
    assert equal(scaling_state(model).state_dict(), state)


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_a_state_loaded_before_the_first_forward_is_used_by_it(target: str) -> None:
    state = scaling_state(trained(target=target)[0]).state_dict()
    torch._dynamo.reset()
    model = mlp()
    scaling_state(model).load_state_dict(state)
    assert equal(scaling_state(model).state_dict(), state), "what waits for a graph is part of the state"
    compiled = torch.compile(model, backend=UncompiledBackend(Config(target=target)))
    compiled(1e-3 * torch.randn(16, D)).sum().backward()
    after = scaling_state(model).state_dict()
    assert set(after) == set(state)
    assert all(after[f"{slot}.counts"][:2].tolist() == [4, 4] for slot in SLOTS)
    # The largest in the history is still one of the loaded ones.
    assert torch.equal(after["0#0.input.scale"], state["0#0.input.scale"])


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_a_loaded_scale_is_the_one_that_quantizes(target: str) -> None:
    """Scales 2**20 times too large saturate everything: whoever loads them sees it in the output."""
    model, compiled = trained(target=target, amax_history_len=1)
    x = torch.randn(16, D)
    state = scaling_state(model).state_dict()
    tiny = {
        key: tensor * 2.0**20 if key == "0#0.input.scale" else tensor * 2.0**-20 if "0#0.input.amax" in key else tensor
        for key, tensor in state.items()
    }
    scaling_state(model).load_state_dict(tiny)
    y, expected = compiled(x), model(x)
    assert (y - expected).norm() > 0.3 * expected.norm()
    scaling_state(model).load_state_dict(state)
    assert (compiled(x) - expected).norm() < 0.2 * expected.norm()


RESUME = """
import json, sys
sys.path.insert(0, {support!r})
import torch
from torch import nn
from uncompiled import UncompiledBackend
from fp8_compile import Config, scaling_state

first, last, load = json.loads(sys.argv[1])
for target in ("cpu", "cuda:90"):
    file = target.replace(":", "_") + ".pt"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if load:
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        scaling_state(model).load_state_dict(saved["scaling"])
    config = Config(amax_history_len=3, scale_update_interval=2, target=target)
    compiled = torch.compile(model, backend=UncompiledBackend(config))
    for step in range(first, last):
        x = (1 + step % 4) * torch.randn(16, 32, generator=torch.Generator().manual_seed(step))
        loss = (compiled(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scales = {{key: tensor.tolist() for key, tensor in scaling_state(model).state_dict().items()}}
        print(json.dumps([target, step, loss.item(), scales]))
        if step == 3:
            torch.save({{"model": model.state_dict(), "scaling": scaling_state(model).state_dict()}}, file)
"""


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Any]]:
    """What a process says of all steps, and another one of those after the checkpoint, each for both targets."""
    folder = tmp_path_factory.mktemp("resumed")
    (folder / "script.py").write_text(RESUME.format(support=str(ROOT / "tests" / "support")))

    def run(first: int, last: int, load: bool) -> list[Any]:
        command = [sys.executable, "script.py", json.dumps([first, last, load])]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]

    return run(0, 9, False), run(4, 9, True)


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_a_run_resumed_in_a_new_process_continues_bit_for_bit(target: str, resumed: tuple[list[Any], Any]) -> None:
    whole, after = ([step[1:] for step in one if step[0] == target] for one in resumed)
    assert len(whole) == 9 and after == whole[4:]
    assert len({step[1] for step in whole}) == 9, "the losses differ from step to step"


# --- a state that does not fit


def without(state: dict[str, Tensor], slot: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in state.items() if not key.startswith(f"{slot}.")}


def renamed(state: dict[str, Tensor], slot: str, name: str) -> dict[str, Tensor]:
    return {key.replace(f"{slot}.", f"{name}."): tensor for key, tensor in state.items()}


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], list[str]]] = {
    "missing": (lambda state: without(state, "2#0.weight"), ["missing: 2#0.weight"]),
    "unknown": (lambda state: {**state, **renamed(state, "0#0.input", "attic.7#0.input")}, ["attic.7#0.input"]),
    "both": (lambda state: renamed(state, "0#0.input", "attic#0.input"), ["missing: 0#0.input", "attic#0.input"]),
    "short history": (
        lambda state: {**state, "2#0.input.amax_history": torch.zeros(5)}, ["2#0.input", "history of 5", "16"]
    ),
    "not whole": (
        lambda state: {key: value for key, value in state.items() if key != "0#0.input.counts"}, ["0#0.input"]
    ),
    "not a number": (
        lambda state: {**state, "2#0.input.scale": torch.tensor(float("nan"))}, ["2#0.input", "nan", "finite"]
    ),
    "negative": (lambda state: {**state, "2#0.input.scale": torch.tensor(-1.0)}, ["2#0.input", "-1.0"]),
    "nothing": (lambda state: {}, sorted(SLOTS)),
    "all zeros": (
        lambda state: {key: torch.zeros_like(value) for key, value in state.items()}, ["#0.", "largest", "448"]
    ),
    "an empty history": (lambda state: {**state, "0#0.input.amax_history": torch.zeros(0)}, ["0#0.input", "at least"]),
    "a history with an infinity": (
        lambda state: {**state, "0#0.input.amax_history": torch.full((16,), torch.inf)}, ["0#0.input", "inf", "finite"]
    ),
    "a scale of two": (lambda state: {**state, "0#0.input.scale": torch.ones(2)}, ["0#0.input: scale", "[2]", "one"]),
    "a square history": (lambda state: {**state, "0#0.input.amax_history": torch.ones(4, 4)}, ["0#0.input", "[4, 4]"]),
    "too many counts": (
        lambda state: {**state, "0#0.input.counts": torch.zeros(99, dtype=torch.int32)}, ["0#0.input", "99 numbers"]
    ),
    "huge counts": (lambda state: {**state, "0#0.input.counts": torch.full((2,), 2**40)}, ["0#0.input", str(2**40)]),
    "another field": (lambda state: {**state, "0#0.input.colour": torch.ones(())}, ["0#0.input", "other fields"]),
    "no slot": (lambda state: {**state, **renamed(state, "0#0.input", "attic")}, ["attic: not the name of a slot"]),
    "a role that is none": (lambda state: renamed(state, "0#0.input", "0#0.output"), ["0#0.output", "grad_output"]),
}  # fmt: skip

WRONG_TYPES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], list[str]]] = {
    "no dict": (lambda state: [*state.values()], ["dict of tensors", "list"]),
    "None": (lambda state: {**state, "0#0.input.scale": None}, ["0#0.input: scale is NoneType", "tensor"]),
    "a list": (lambda state: {**state, "0#0.input.amax_history": [0.0] * 16}, ["0#0.input: amax_history is list"]),
    "a text": (lambda state: {**state, "0#0.input.largest": "448"}, ["0#0.input: largest is str"]),
    "a key that is no text": (lambda state: {**state, 3: torch.ones(())}, ["the key 3", "0#0.input.scale"]),
    "fractions of counts": (lambda state: {**state, "0#0.input.counts": torch.ones(5)}, ["0#0.input: counts", "integ"]),
    "complex": (lambda state: {**state, "0#0.input.scale": torch.tensor(1j)}, ["0#0.input: scale", "complex64"]),
    "meta": (lambda state: {**state, "0#0.input.scale": torch.ones((), device="meta")}, ["0#0.input: scale", "meta"]),
    "sparse": (
        lambda state: {**state, "0#0.input.amax_history": torch.ones(16).to_sparse()}, ["0#0.input: amax_hi", "sparse"]
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()[0]


@pytest.mark.parametrize("misfit", [*MISFITS, *WRONG_TYPES])
def test_a_state_that_does_not_fit_is_an_error_that_names_the_slots_and_changes_nothing(
    misfit: str, model: nn.Module
) -> None:
    before = scaling_state(model).state_dict()
    change, words = {**MISFITS, **WRONG_TYPES}[misfit]
    with pytest.raises(TypeError if misfit in WRONG_TYPES else ValueError) as error:
        scaling_state(model).load_state_dict(change(spoiled(before)))
    assert all(word in str(error.value) for word in words), error.value
    assert equal(scaling_state(model).state_dict(), before), "what waits for a graph would be seen too"


def test_a_loaded_state_is_a_copy_that_its_owner_may_write_to() -> None:
    saved = scaling_state(trained()[0]).state_dict()
    state = ScalingState()
    state.load_state_dict(saved)
    kept = {key: tensor.clone() for key, tensor in saved.items()}
    for tensor in saved.values():
        tensor.zero_()
    assert equal(state.state_dict(), kept)


def test_of_several_states_none_is_changed_where_one_does_not_fit() -> None:
    from fp8_compile.training.step_counter import StepCounter

    torch._dynamo.reset()
    model = nn.Sequential(mlp(), mlp())
    compiled = [torch.compile(part, backend=UncompiledBackend(Config())) for part in model]
    for part in compiled:
        part(torch.randn(8, D)).sum().backward()
    part, before = StepCounter(model), StepCounter(model).state_dict()
    spoilt = {"steps": 3, "states": {name: spoiled(state) for name, state in before["states"].items()}}
    spoilt["states"]["1"]["0#0.input.scale"] = torch.tensor(-1.0)
    with pytest.raises(ValueError, match="slot 0#0.input has a scale of -1.0"):
        part.load_state_dict(spoilt)
    after = part.state_dict()
    assert after["steps"] == 0 and all(equal(after["states"][name], before["states"][name]) for name in ("0", "1"))
    with pytest.raises(ValueError, match="a module '7', which the model does not have"):
        part.load_state_dict({"steps": 3, "states": {"7": {}}})
    with pytest.raises(TypeError, match="states of NoneType"):
        part.load_state_dict({"steps": 3})


def test_before_the_first_forward_a_slot_of_no_module_is_refused() -> None:
    state = scaling_state(trained()[0]).state_dict()
    model = mlp()
    with pytest.raises(ValueError, match="unknown: attic#0.input"):
        scaling_state(model).load_state_dict(renamed(state, "0#0.input", "attic#0.input"))
    assert scaling_state(model).state_dict() == {}


def test_a_history_of_another_length_is_found_out_when_the_model_is_compiled() -> None:
    state = scaling_state(trained(amax_history_len=4)[0]).state_dict()
    torch._dynamo.reset()
    model = mlp()
    scaling_state(model).load_state_dict(state)
    with pytest.raises(Exception, match="saved with a history of 4; expected amax_history_len=16"):
        torch.compile(model, backend=UncompiledBackend())(torch.randn(8, D))


class Hidden(nn.Module):
    """A layer in a plain list, where ``named_modules`` does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(D, D), [nn.Linear(D, D)]

    def forward(self, x: Tensor) -> Tensor:
        return self.rest[0](self.first(x))


def test_a_state_fits_a_new_copy_of_the_model_also_where_a_layer_is_in_a_plain_list() -> None:
    model = Hidden()
    torch.compile(model, backend=UncompiledBackend())(torch.randn(8, D)).sum().backward()
    state = scaling_state(model).state_dict()
    assert len(state) == 6 * len(FIELDS)
    other = Hidden()
    scaling_state(other).load_state_dict(state)
    assert equal(scaling_state(other).state_dict(), state)


def test_a_state_saved_for_another_format_is_rescaled() -> None:
    state = scaling_state(trained()[0]).state_dict()
    model, _ = trained(forward_format="e5m2")
    scaling_state(model).load_state_dict(state)
    loaded = scaling_state(model).state_dict()
    assert loaded["0#0.input.scale"] == state["0#0.input.scale"] * (57344 / 448)
    assert torch.equal(loaded["0#0.input.amax_history"], state["0#0.input.amax_history"])
    assert loaded["0#0.input.largest"] == 57344


def test_a_margin_beyond_all_reason_is_refused_by_the_config() -> None:
    with pytest.raises(ValueError, match="margin"):
        Config(margin=2000)


# --- forgotten


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_after_a_reset_the_next_pass_takes_its_scales_from_its_own_tensors(target: str) -> None:
    model, compiled = trained(target=target)
    scaling_state(model).reset()
    state = scaling_state(model).state_dict()
    assert set(state) == {f"{slot}.{field}" for slot in SLOTS for field in FIELDS}
    assert not any(tensor.any() for key, tensor in state.items() if not key.endswith("largest"))
    x = 1e-6 * torch.randn(16, D)  # far below what the old scales would have kept
    model.zero_grad()
    compiled(x).square().sum().backward()
    found = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).square().sum().backward()
    assert (found - model[0].weight.grad).norm() < 0.2 * model[0].weight.grad.norm()
    state = scaling_state(model).state_dict()
    assert all(state[f"{slot}.counts"].tolist() == [1, 1, *[0] * 5] for slot in SLOTS)
    assert state["0#0.input.scale"] == (4 * x.abs().max()).reciprocal() * 448


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_a_deleted_model_takes_its_state_with_it(target: str) -> None:
    model, compiled = trained(target=target)
    watched: list[weakref.ref[Any]] = [weakref.ref(scaling_state(model)), weakref.ref(model)]
    watched += [weakref.ref(page.history) for page in scaling_state(model).tables]
    del model, compiled
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * len(watched)


def test_two_models_of_one_class_have_nothing_in_common() -> None:
    torch._dynamo.reset()
    models = [mlp(), mlp()]
    backend = UncompiledBackend()
    compiled = [torch.compile(model, backend=backend) for model in models]
    for step in range(3):
        compiled[0](torch.randn(8, D)).sum().backward()
        before = scaling_state(models[0]).state_dict()
        compiled[1](1000 * torch.randn(8, D)).sum().backward()
        assert equal(scaling_state(models[0]).state_dict(), before), step
    states = [scaling_state(model).state_dict() for model in models]
    assert states[0]["0#0.input.scale"] > 100 * states[1]["0#0.input.scale"]
    scaling_state(models[1]).reset()
    assert scaling_state(models[0]).state_dict()["0#0.input.counts"][:2].tolist() == [3, 3]


def test_a_state_of_its_own_is_empty_and_takes_anything_that_is_whole() -> None:
    state = ScalingState()
    assert state.state_dict() == {} and len(state.stats()) == 0
    saved = scaling_state(trained()[0]).state_dict()
    state.load_state_dict(saved)
    assert equal(state.state_dict(), saved)
