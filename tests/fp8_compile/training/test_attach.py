"""attach(): one line around a loop that stays as it is; what is wrong with its use is said at once."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

import fp8_compile
from byte_lm import ByteLM, batches, stdlib_text
from fp8_compile import Config, LossScaler, scaling_state
from fp8_compile.training.loss_scaling import LossScaling

D = 32
SGD = torch.optim.SGD


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D, 48), nn.Tanh(), nn.Linear(48, D))


def compiled_mlp() -> tuple[nn.Module, Any]:
    model = mlp()
    return model, torch.compile(model, backend=UncompiledBackend())


# --- the whole of it, compiled for real


class Loop:
    """A user's loop, FP8 or not."""

    def __init__(self, model: nn.Module, data: list[tuple[Tensor, Tensor]], **options: Any) -> None:
        self.model, self.data = model, data
        self.compiled = torch.compile(model, **options)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 400)
        self.losses: list[float] = []
        self.train: Any = None

    def run(self, start: int, stop: int) -> None:
        for tokens, targets in self.data[start:stop]:
            loss = self.compiled(tokens, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def parts(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.scheduler, self.train


def test_200_steps_with_everything_on_stay_within_a_percent_of_fp32_and_resume_bit_for_bit() -> None:
    source = batches(stdlib_text(500_000), batch=8, time=32, generator=torch.Generator().manual_seed(0))
    data = list(itertools.islice(source, 200))
    model = ByteLM(layers=1, d=64, heads=2, hidden=128, context=32)
    full = Loop(copy.deepcopy(model), data, backend="eager")
    full.run(0, 200)

    fresh = copy.deepcopy(model).to(torch.bfloat16)
    options = {"backend": "fp8", "options": {"warmup_steps": 5}}
    on = {"loss_scale": "dynamic", "master_weights": True}
    fp8 = Loop(copy.deepcopy(fresh), data, **options)
    fp8.train = fp8_compile.attach(fp8.compiled, fp8.optimizer, **on)
    fp8.run(0, 190)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in fp8.parts()], file)
    fp8.run(190, 200)
    assert sum(fp8.losses[-20:]) == pytest.approx(sum(full.losses[-20:]), rel=0.01)
    assert sum(full.losses[-20:]) < 0.7 * 20 * full.losses[0], "it has learned something"
    assert (fp8.train.steps, fp8.train.skipped_steps, fp8.train.loss_scale) == (200, 0, 2.0**16)

    torch._dynamo.reset()
    again = Loop(copy.deepcopy(fresh), data, **options)
    again.train = fp8_compile.attach(again.compiled, again.optimizer, **on)
    file.seek(0)
    for part, state in zip(again.parts(), torch.load(file, weights_only=True)):
        part.load_state_dict(state)
    again.run(190, 200)
    assert again.losses == fp8.losses[-10:], "no warm-up, no first pass again"
    masters = zip(again.train.master_weights.fp32_params(), fp8.train.master_weights.fp32_params())
    assert all(torch.equal(one, two) for one, two in masters)
    one, two = (scaling_state(loop.model).state_dict() for loop in (again, fp8))
    assert set(one) == set(two) and all(torch.equal(one[key], two[key]) for key in one)


# --- the shape of a loop


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def test_a_closure_and_blocks_compiled_by_themselves_work_like_the_plain_loop() -> None:
    torch.manual_seed(0)
    x, results = torch.randn(16, D), {}
    blocks = nn.Sequential(Block(), Block())
    for way in ("plain", "closure", "blocks"):
        torch._dynamo.reset()
        model = copy.deepcopy(blocks)
        if way == "blocks":
            for block in model:
                block.compile(backend=UncompiledBackend())
        compiled = model if way == "blocks" else torch.compile(model, backend=UncompiledBackend())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        train = fp8_compile.attach(compiled, optimizer, loss_scale=2.0**8)

        def closure(optimizer: Any = optimizer, compiled: Any = compiled) -> Tensor:
            optimizer.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            if way == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        assert train.steps == 3
        assert train.state_dict()["scaling"]["states"].keys() == ({"0", "1"} if way == "blocks" else {""})
        results[way] = [parameter.detach() for parameter in model.parameters()]
    assert all(map(torch.equal, results["plain"], results["closure"]))
    assert all(map(torch.equal, results["plain"], results["blocks"]))


def test_detach_leaves_no_hook_and_no_scale_and_attach_works_again() -> None:
    model, compiled = compiled_mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    train = fp8_compile.attach(compiled, optimizer, loss_scale="dynamic", master_weights=True)
    compiled(torch.randn(16, D)).sum().backward()
    optimizer.step()
    train.detach()
    compiled(torch.randn(16, D)).sum().backward()
    model[0].weight.grad.fill_(torch.nan)
    optimizer.step()
    assert (train.steps, train.skipped_steps, train.loss_scale) == (1, 0, 1.0)
    assert model[0].weight.isnan().all(), "nobody skips any more"
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_load_state_dict_pre_hooks
    assert fp8_compile.attach(compiled, optimizer, loss_scale=4.0).loss_scale == 4


# --- bad use


def test_an_optimizer_of_another_model_is_refused() -> None:
    _, compiled = compiled_mlp()
    with pytest.raises(ValueError, match="none of the optimizer's 4 parameters is one of Sequential's 4.*SGD"):
        fp8_compile.attach(compiled, SGD(mlp().parameters(), lr=0.1))
    with pytest.raises(TypeError, match="optimizer of torch.optim, got int"):
        fp8_compile.attach(compiled, 3)  # type: ignore[arg-type]


def test_a_second_attach_of_a_model_and_its_optimizer_is_refused() -> None:
    model, compiled = compiled_mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    train = fp8_compile.attach(compiled, optimizer)
    for same in (compiled, model):
        with pytest.raises(ValueError, match=r"Sequential and this SGD are attached already.*train.detach\(\)"):
            fp8_compile.attach(same, optimizer)
    other = torch.compile(nn.ModuleList(model).append(nn.Linear(D, D)), backend=UncompiledBackend())
    with pytest.raises(ValueError, match=r"this SGD is attached already, to Sequential, .* to ModuleList too; "):
        fp8_compile.attach(other, optimizer)
    train.detach()
    fp8_compile.attach(model, optimizer)


def test_a_model_that_is_not_compiled_or_by_another_backend_is_refused() -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Sequential is not compiled.*torch.compile\(model, backend='fp8'\)"):
        fp8_compile.attach(model, optimizer)
    with pytest.raises(ValueError, match="backend='inductor', which does no FP8"):
        fp8_compile.attach(torch.compile(model), optimizer)
    with pytest.raises(TypeError, match="got function; of a compiled function, compile the module"):
        fp8_compile.attach(torch.compile(lambda x: x), optimizer)  # type: ignore[arg-type]
    kept = torch.compile(model, backend="fp8")
    assert fp8_compile.attach(model, optimizer).model is kept._orig_mod, "the plain module of a compiled one will do"


def test_a_loss_scale_that_comes_too_late_or_makes_no_sense_is_refused() -> None:
    model, compiled = compiled_mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="loss_scale expects None, 'dynamic' or a finite number above 0, got -1"):
        fp8_compile.attach(compiled, optimizer, loss_scale=-1)
    compiled(torch.randn(16, D)).sum().backward()
    with pytest.raises(ValueError, match="before the first forward, or torch._dynamo.reset"):
        fp8_compile.attach(compiled, optimizer, loss_scale=4.0)
    fp8_compile.attach(compiled, optimizer, master_weights=True).detach()
    torch._dynamo.reset()
    train = fp8_compile.attach(compiled, optimizer, loss_scale=4.0)
    compiled(torch.full((16, D), torch.inf)).sum().backward()
    optimizer.step()
    assert train.skipped_steps == 1, "compiled anew, with the scale"


def test_fp16_parameters_without_masters_are_warned_of() -> None:
    model = mlp().half()
    compiled = torch.compile(model, backend="fp8")
    with pytest.warns(UserWarning, match="lost below 6e-8.*master_weights=True"):
        fp8_compile.attach(compiled, SGD(model.parameters(), lr=0.1), loss_scale=4.0)


def test_a_checkpoint_of_other_arguments_is_refused() -> None:
    model, compiled = compiled_mlp()
    train = fp8_compile.attach(compiled, SGD(model.parameters(), lr=0.1), loss_scale=4.0)
    state = train.state_dict()
    train.load_state_dict(state)
    with pytest.raises(ValueError, match="does not fit parts.*same arguments"):
        train.load_state_dict({**state, "weights": {}})
    other, compiled = compiled_mlp()
    dynamic = fp8_compile.attach(compiled, SGD(other.parameters(), lr=0.1), loss_scale=LossScaler("cpu"))
    with pytest.raises(ValueError, match="written with loss_scale=4.0, attach.. was called with 'dynamic'"):
        dynamic.load_state_dict(state)
    half = mlp().to(torch.bfloat16)
    masters = fp8_compile.attach(
        torch.compile(half, backend=UncompiledBackend(Config())), SGD(half.parameters(), lr=0.1), master_weights=True
    )
    with pytest.raises(ValueError, match="no master weights"):
        masters.load_state_dict({key: state[key] for key in ("skipped_steps", "scaling")})


# --- steps that raise, and optimizers that step twice


def test_a_skipped_step_that_raises_gives_the_gradients_back_and_is_skipped_when_it_is_tried_again() -> None:
    model, compiled = compiled_mlp()
    optimizer = SGD(model.parameters(), lr=1.0)
    train = fp8_compile.attach(compiled, optimizer, loss_scale=8.0)
    (compiled(torch.randn(16, D)).sum() * float("inf")).backward()

    def full(*_: Any) -> None:
        raise OSError("disk is full")

    hook = optimizer.register_step_post_hook(full)
    optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)  # before ours
    weights = copy.deepcopy(model.state_dict())
    with pytest.raises(OSError, match="disk is full"):
        optimizer.step()
    assert all(parameter.grad is not None for parameter in model.parameters())
    hook.remove()
    optimizer.step()
    assert train.skipped_steps == 1 and train.steps == 0
    assert all(torch.equal(weights[name], saved) for name, saved in model.state_dict().items())


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_subclass_that_calls_the_step_of_its_base_makes_one_step(with_closure: bool) -> None:
    """Torch calls hooks in both, since both are optimizers: seen from outside it is one step."""

    class Logged(SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    assert hasattr(SGD([torch.zeros(1)], lr=1.0).step, "hooked"), "the base has hooks by now"
    model, compiled = compiled_mlp()
    model.to(torch.bfloat16)
    optimizer = Logged(model.parameters(), lr=0.5)
    train = fp8_compile.attach(compiled, optimizer, loss_scale="dynamic", master_weights=True)
    x, looked = torch.randn(16, D, dtype=torch.bfloat16), []
    part = train.part(LossScaling)
    inspect = part.inspect
    part.inspect = lambda step: (looked.append(step), inspect(step))

    def closure() -> Tensor:
        loss = compiled(x).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.zero_grad()
        optimizer.step(closure) if with_closure else (closure(), optimizer.step())
    assert len(looked) == 2 and train.steps == 2
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
