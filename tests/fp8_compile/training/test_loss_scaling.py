"""Loss scaling inside the graphs: unseen from outside, it saves small gradients, and a bad step leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Config, LossScaler, scaling_state

D = 32


class Broken(nn.Module):
    """Two graphs, with a gradient that goes from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, 48), nn.Linear(48, D)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x)


class Run:
    """A model in training under the backend; a bad batch is one with a factor that is not finite."""

    def __init__(self, loss_scale: Any, dtype: torch.dtype = torch.float32, /, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = Broken().to(dtype)
        self.compiled = torch.compile(self.model, backend=UncompiledBackend(Config(**options)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.train = fp8_compile.attach(self.compiled, self.optimizer, loss_scale=loss_scale)
        self.dtype = dtype

    def backward(self, batch: int) -> None:
        x = torch.randn(8, D, generator=torch.Generator().manual_seed(batch)).to(self.dtype)
        self.compiled(x).float().square().mean().backward()

    def step(self, *batches: int) -> None:
        for batch in batches:
            self.backward(batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def everything(self) -> dict[str, Any]:
        """All that a step may change, but for the loss scale."""
        state = self.optimizer.state_dict()["state"]
        tensors = {f"optimizer.{i}.{key}": item for i, row in state.items() for key, item in row.items()}
        return copy.deepcopy({**self.model.state_dict(), **tensors, **scaling_state(self.model).state_dict()})


def assert_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert set(one) == set(two)
    assert [key for key in one if not torch.equal(one[key], two[key])] == []


@pytest.mark.parametrize("recipe, dtype", [("delayed", torch.bfloat16), ("rowwise", torch.float32)])
def test_a_power_of_two_is_not_seen_from_outside(recipe: str, dtype: torch.dtype) -> None:
    """Graph break, two micro-batches a step and clipping included; the scale that grows on the way too."""
    ways = [
        Run(None, dtype, recipe=recipe),
        Run(2.0**16, dtype, recipe=recipe),
        Run(None, dtype, recipe=recipe, loss_scale=2.0**10),
        Run(LossScaler("cpu", init_scale=4, growth_interval=1), dtype, recipe=recipe),
    ]
    for run in ways:
        for step in range(3):
            run.step(2 * step, 2 * step + 1)
    assert [run.train.loss_scale for run in ways] == [1, 2.0**16, 2.0**10, 4 * 2.0**3]
    for run in ways[1:]:
        assert_equal(run.everything(), ways[0].everything())


class Mixed(nn.Module):
    """Gradients in FP32, FP64 and complex numbers, of parameters and of what crosses a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.wave = nn.Parameter(torch.randn(D, D, dtype=torch.complex64))
        self.exact = nn.Parameter(torch.randn(D, D, dtype=torch.float64) * 1e-60)

    def forward(self, x: Tensor) -> Tensor:
        wave = self.linear(x).to(torch.complex64) @ self.wave
        torch._dynamo.graph_break()
        return self.linear((wave * wave).real) + (self.linear(x).double() @ self.exact * 1e60).float()


def test_gradients_in_fp64_and_in_complex_numbers_are_those_of_the_unscaled_loss() -> None:
    x, found = torch.randn(8, D), []
    model = Mixed()
    for loss_scale in (None, 2.0**16):
        torch._dynamo.reset()
        model.zero_grad()
        options = Config(recipe="tensorwise", loss_scale=loss_scale)
        torch.compile(model, backend=UncompiledBackend(options))(x).square().mean().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_equal(*found)
    assert found[0]["exact"].abs().amax() > 1e50, "FP32 would be Inf"


def test_sparse_gradients_are_scaled_back_and_looked_at() -> None:
    embed, found = nn.Embedding(64, D, sparse=True), []
    model, tokens = nn.Sequential(embed, nn.Linear(D, D)), torch.randint(0, 64, (32,))
    for loss_scale in (None, "dynamic"):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=UncompiledBackend(Config(recipe="tensorwise")))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        train = fp8_compile.attach(compiled, optimizer, loss_scale=loss_scale)
        optimizer.zero_grad()
        compiled(tokens).square().mean().backward()
        found.append(embed.weight.grad)
        if loss_scale:
            embed.weight.grad = embed.weight.grad * float("inf")
        optimizer.step()
        train.detach()
    assert all(gradient.is_sparse for gradient in found) and train.skipped_steps == 1
    assert torch.equal(*(gradient.to_dense() for gradient in found))


class Tiny(nn.Module):
    """A loss whose gradients, correct in FP32, are below what FP16 can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, 48), nn.Tanh(), nn.Linear(48, D))

    def forward(self, x: Tensor) -> Tensor:
        return 1e-6 * self.layers(x).float().square().mean()


def test_fp16_gradients_that_underflow_are_recovered() -> None:
    x, errors = torch.randn(16, D), {}
    for loss_scale in (None, 2.0**16):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Tiny().half()
        exact = copy.deepcopy(model).float()
        compiled = torch.compile(model, backend=UncompiledBackend())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fp8_compile.attach(compiled, optimizer, loss_scale=loss_scale, master_weights=True)
        compiled(x.half()).backward()
        exact(x).backward()
        pairs = [(a.grad, b.grad) for a, b in zip(model.parameters(), exact.parameters())]
        assert all(a.dtype == torch.float32 and 0 < b.abs().max() < 2**-24 for a, b in pairs)
        errors[loss_scale] = [float((a - b).norm() / b.norm()) for a, b in pairs]
    assert min(errors[None]) == 1, "all of it is lost"
    # E5M2 has 2 bits behind the point: a relative error of up to 2**-3 an element, two roundings deep.
    assert max(errors[2.0**16]) < 2**-3


def poison_input(run: Run) -> None:
    x = torch.randn(8, D)
    x[0, 0] = torch.inf
    run.compiled(x).mean().backward()


def poison_loss(run: Run) -> None:
    (run.compiled(torch.randn(8, D)).mean() * torch.nan).backward()


def poison_gradient(run: Run) -> None:
    run.backward(7)
    run.model.second.bias.grad[3] = torch.inf


def bad_step(run: Run, poison: Any) -> Tensor:
    """A good micro-batch, a bad one, a step."""
    run.backward(5)
    poison(run)
    gradient = run.model.first.weight.grad
    run.optimizer.step()
    assert run.model.first.weight.grad is gradient, "the gradients are still there to be looked at"
    run.optimizer.zero_grad()
    return gradient


def test_a_bad_step_is_skipped_and_leaves_no_trace() -> None:
    good, bad = Run("dynamic"), Run("dynamic")
    for step, poison in enumerate([poison_input, poison_loss, poison_gradient]):
        for run in (good, bad):
            run.step(step)
        before = bad.everything()
        bad_step(bad, poison)
        assert_equal(bad.everything(), before)
        assert (bad.train.skipped_steps, bad.train.loss_scale) == (step + 1, 2.0 ** (15 - step))
    for run in (good, bad):
        run.step(10)
        run.step(11)
    assert_equal(bad.everything(), good.everything())
    assert bad.train.skipped_steps == bad.train.loss_scaler.skipped_steps == 3
    assert bad.train.steps == good.train.steps == 5


def test_a_first_step_that_is_bad_leaves_the_next_one_to_be_the_first() -> None:
    good, bad = Run("dynamic"), Run("dynamic")
    bad_step(bad, poison_input)
    for run in (good, bad):
        run.step(10)
        run.step(11)
    assert_equal(bad.everything(), good.everything())


def test_a_bad_step_does_not_undo_what_was_loaded_or_calibrated() -> None:
    """Before the first pass of a resumed run, and between a step and the next."""
    first = Run("dynamic")
    first.step(0)
    saved = first.train.state_dict()
    resumed = Run("dynamic")
    resumed.train.load_state_dict(saved)
    bad_step(resumed, poison_input)
    assert_equal(scaling_state(resumed.model).state_dict(), scaling_state(first.model).state_dict())

    resumed.step(1)
    scaling_state(resumed.model).load_state_dict(saved["scaling"]["states"][""])
    bad_step(resumed, poison_gradient)
    assert_equal(scaling_state(resumed.model).state_dict(), scaling_state(first.model).state_dict())
    scaling_state(resumed.model).reset()
    bad_step(resumed, poison_loss)
    state = scaling_state(resumed.model).state_dict()
    assert all(not tensor.any() for name, tensor in state.items() if name.endswith((".scale", ".amax_history")))

    primed = Run("dynamic")
    calibration = fp8_compile.calibrate(primed.model, [torch.full((8, D), 7.0)], hessians=False, progress=False)
    scaling_state(primed.model).prime(calibration)
    bad_step(primed, poison_loss)
    primed.backward(0)
    assert scaling_state(primed.model).state_dict()["first#0.input.amax_history"][0] == 7


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_model_that_is_attached_again_has_its_loss_scale_again(recipe: str) -> None:
    run = Run(2.0**4, recipe=recipe)
    run.step(0)
    run.train.detach()
    poison_loss(run)
    run.optimizer.zero_grad()
    again = fp8_compile.attach(run.compiled, run.optimizer, loss_scale=2.0**126, weight_cache=False)
    (100 * run.compiled(torch.randn(8, D)).sum()).backward()
    run.optimizer.step()
    assert (again.steps, again.skipped_steps, again.loss_scale) == (0, 1, 2.0**126), "its code overflows by that scale"


def test_a_scaler_that_has_counted_steps_before_goes_on_counting() -> None:
    scaler = LossScaler("cpu", init_scale=4, growth_interval=2)
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 1})
    run = Run(scaler)
    run.step(0)
    assert run.train.loss_scale == scaler.get_scale() == 8


def test_a_scaler_that_is_off_is_no_scaler() -> None:
    run = Run(LossScaler("cpu", enabled=False))
    run.step(0)
    assert (run.train.steps, run.train.loss_scale, run.train.loss_scaler) == (1, 1, None)
    run.train.load_state_dict(run.train.state_dict())


def test_a_scale_that_is_too_large_comes_down_by_itself() -> None:
    run = Run(LossScaler("cpu", init_scale=2.0**126, growth_interval=100))
    for _ in range(12):
        (1e3 * run.compiled(torch.randn(8, D)).sum()).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
    scale = run.train.loss_scale
    assert 2.0**110 < scale < 2.0**126 and run.train.steps > 0
    assert scale == run.train.loss_scaler.get_scale() == 2.0 ** (126 - run.train.skipped_steps)


class CountWaits(TorchDispatchMode):
    """How often the host asks a device for a number."""

    waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_step_waits_for_the_device_once_however_many_parameters() -> None:
    run = Run("dynamic")
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    run.train.detach()
    run.train = fp8_compile.attach(run.compiled, run.optimizer, loss_scale="dynamic")
    for poisoned in (False, True):
        run.backward(0)
        if poisoned:
            run.model.first.weight.grad.fill_(torch.nan)
        with CountWaits() as counted:
            run.optimizer.step()
        assert counted.waits == 1


def test_a_dynamic_scale_that_nobody_updates_is_an_error_and_so_are_two_scales() -> None:
    model = nn.Linear(D, D)
    compiled = torch.compile(model, backend=UncompiledBackend(Config(loss_scale="dynamic")))
    with pytest.raises(Exception, match="has nobody to update it: call fp8_compile.attach"):
        compiled(torch.randn(16, D))
    train = fp8_compile.attach(compiled, torch.optim.SGD(model.parameters(), lr=0.1))
    compiled(torch.randn(16, D)).sum().backward()
    assert train.loss_scale == 2.0**16, "as the options said"
    run = Run(8.0, loss_scale=4.0)
    with pytest.raises(Exception, match="loss_scale=4.0 in the options .* loss_scale=8.0 in attach"):
        run.backward(0)


def test_explain_needs_no_optimizer() -> None:
    report = fp8_compile.explain(nn.Linear(D, D), args=(torch.randn(16, D),), config=Config(loss_scale="dynamic"))
    assert len(report.rewritten) > 0


def test_a_grad_scaler_beside_it_is_an_error_unless_it_is_off() -> None:
    run = Run("dynamic")
    for scaler in (torch.amp.GradScaler("cpu"), LossScaler("cpu")):
        scaler.scale(run.compiled(torch.randn(8, D)).mean()).backward()
        with pytest.raises(ValueError, match="both on: the loss would be scaled twice. Remove the scaler"):
            scaler.step(run.optimizer)
        run.optimizer.zero_grad()
    run.backward(0)
    torch.amp.GradScaler("cpu", enabled=False).step(run.optimizer)
    assert run.train.steps == 1
