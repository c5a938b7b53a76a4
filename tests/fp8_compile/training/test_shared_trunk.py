"""Models with a module in common, each with an optimizer of its own: actor and critic, two heads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import scaling_state
from fp8_compile.scaling.find_state import states_within
from fp8_compile.scaling.weight_cache import caches_of
from fp8_compile.training.loss_scaling import LossScaling

D = 32
WAYS = ("wholes", "trunk")  # each model is compiled as a whole, or their trunk by itself
SGD = torch.optim.SGD


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, 64), nn.Linear(64, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Head(nn.Module):
    """Actor or critic: a trunk that others have too, and a layer of its own."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.out = trunk, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.trunk(x)))


class Actor(Head):
    pass


class Critic(Head):
    pass


class Pair:
    """Actor and critic; the trunk is trained by the critic's optimizer, with ``both`` by the actor's too."""

    def __init__(self, way: str, *, both: bool = False, fp8: bool = True, attach: Any = ({}, {})) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.trunk = Trunk()
        self.models: list[nn.Module] = [Actor(self.trunk), Critic(self.trunk)]
        if fp8 and way == "trunk":
            self.trunk.compile(backend=UncompiledBackend())
        wholes = fp8 and way == "wholes"
        self.run = [torch.compile(m, backend=UncompiledBackend()) if wholes else m for m in self.models]
        self.optimizers = [
            SGD([*model.out.parameters(), *(self.trunk.parameters() if both or i else ())], lr=1.0)
            for i, model in enumerate(self.models)
        ]
        pairs = zip(self.run, self.optimizers, attach) if fp8 else ()
        self.trains = [fp8_compile.attach(model, opt, **options) for model, opt, options in pairs]
        self.x = torch.randn(64, D)
        self.goals = torch.sin(self.x @ torch.randn(2, D, D) * 0.3)

    def loss(self, which: int) -> Tensor:
        return (self.run[which](self.x) - self.goals[which]).square().mean()

    def step(self, which: int, factor: float = 1.0) -> float:
        for model in self.models:
            model.zero_grad()
        loss = self.loss(which)
        (loss * factor).backward()
        self.optimizers[which].step()
        return loss.item()

    def in_fp32(self, which: int) -> Tensor:
        hidden = self.trunk.second(torch.tanh(self.trunk.first(self.x)))
        return self.models[which].out(torch.tanh(hidden)).detach()

    def weights(self, which: int) -> list[Tensor]:
        return copy.deepcopy([*self.models[which].out.parameters()])

    def scale_in_graphs(self, which: int) -> set[float]:
        part = self.trains[which].part(LossScaling)
        return {graphs.value for graphs in part.graphs}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_actor_and_critic_with_a_common_trunk_train_as_in_fp32(way: str, both: bool) -> None:
    loss_scale = 64.0 if both else None
    full, fp8 = Pair(way, both=both, fp8=False), Pair(way, both=both, attach=({"loss_scale": loss_scale},) * 2)
    losses = [[[pair.step(which) for which in (0, 1)] for _ in range(20)] for pair in (full, fp8)]
    assert sum(losses[0][-1]) < 0.9 * sum(losses[0][0]), "it learns"
    assert losses[1][-1] == pytest.approx(losses[0][-1], rel=0.03)
    assert [(train.steps, train.skipped_steps) for train in fp8.trains] == [(20, 0)] * 2
    if loss_scale is not None:
        assert fp8.scale_in_graphs(0) == fp8.scale_in_graphs(1) == {64.0}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_of_one_optimizer_is_seen_by_both_models(way: str) -> None:
    pair = Pair(way)
    pair.step(0), pair.step(1)
    before = pair.in_fp32(0)
    pair.optimizers[1].param_groups[0]["lr"] = 10.0
    pair.step(1)
    error, change = (pair.run[0](pair.x) - pair.in_fp32(0)).norm(), (pair.in_fp32(0) - before).norm()
    assert error < 0.25 * change, "the noise of FP8, not old weights"


def test_what_is_compiled_once_has_one_state_and_one_cache() -> None:
    pair = Pair("trunk")
    pair.step(0), pair.step(1)
    state = scaling_state(pair.trunk)
    slots = [str(slot) for slot, _ in state.trained()]
    assert sorted(slots) == sorted(
        {f"{layer}#0.{role}" for layer in ("first", "second") for role in ("input", "weight", "grad_output")}
    )
    cache = state.weights
    assert cache is not None and len(cache.copies()) == 2
    saved = [train.state_dict()["scaling"]["states"]["trunk"] for train in pair.trains]
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in (saved[0] | saved[1]))
    refreshes = cache.refreshes
    pair.step(0), pair.step(0)
    assert cache.refreshes == refreshes + 1, "after the critic's step; the actor's does not write the trunk"


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_leaves_the_trunk_alone_leaves_the_backward_of_the_other_alone(way: str) -> None:
    pair = Pair(way)
    pair.step(0), pair.step(1)
    waiting = pair.loss(1)
    pair.step(0), pair.step(0)
    waiting.backward()  # as in PyTorch: nothing that it reads was written
    pair.optimizers[1].step()
    assert pair.trains[1].steps == 2


def test_models_compiled_as_wholes_read_one_copy_of_what_they_share() -> None:
    pair = Pair("wholes", both=True)
    for which in (0, 1, 0, 1):
        pair.step(which)
    weights = [pair.trunk.first.weight, pair.trunk.second.weight]
    (owner,) = caches_of(weights)
    own = [scaling_state(model).weights for model in pair.models]
    assert owner is own[0], "the actor ran first"
    assert [len(cache.copies()) for cache in own] == [3, 1], "trunk and head of the actor; the critic's head alone"
    before = owner.refreshes
    pair.loss(0), pair.loss(1)  # the critic stepped last
    assert owner.refreshes == before + 1, "quantized once for both"
    for which in (0, 1):
        exact, found = pair.in_fp32(which), pair.run[which](pair.x)
        assert 20 * torch.log10(exact.norm() / (found - exact).norm()) > 20


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_skipped_step_of_one_does_not_undo_that_of_the_other(way: str, both: bool, first: int) -> None:
    pair = Pair(way, both=both, attach=({"loss_scale": 8.0},) * 2)
    pair.step(0), pair.step(1)
    bad, good = first, 1 - first
    pair.step(good)
    histories = {name: row.clone() for m in pair.models for name, row in states(m).items()}
    weights = [pair.weights(which) for which in (0, 1)]
    pair.step(bad, factor=float("inf"))
    assert all(torch.equal(row, histories[name]) for m in pair.models for name, row in states(m).items())
    assert all(map(torch.equal, weights[bad], pair.weights(bad)))
    assert all(map(torch.equal, weights[good], pair.weights(good)))
    pair.step(good)
    assert not any(map(torch.equal, weights[good], pair.weights(good)))
    assert (pair.trains[bad].skipped_steps, pair.trains[good].skipped_steps) == (1, 0)


def states(model: nn.Module) -> dict[str, Tensor]:
    found = states_within(model)
    return {
        f"{type(model).__name__}{module}{key}": row
        for module, s in found.items()
        for key, row in s.state_dict().items()
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gone", [0, 1])
def test_detaching_one_leaves_the_other_with_its_scale_its_copies_and_its_skips(way: str, gone: int) -> None:
    pair = Pair(way, both=True, attach=({"loss_scale": 8.0},) * 2)
    pair.step(0), pair.step(1)
    pair.trains[gone].detach()
    left = 1 - gone
    assert (
        pair.scale_in_graphs(left) == {8.0} and pair.trains[left].loss_scale == 8 and pair.trains[gone].loss_scale == 1
    )
    assert scaling_state(pair.trunk if way == "trunk" else pair.models[left]).weights is not None
    pair.step(left, factor=float("nan"))
    pair.step(left)
    assert (pair.trains[left].steps, pair.trains[left].skipped_steps) == (2, 1)
    pair.trains[left].detach()
    assert pair.scale_in_graphs(left) == {1.0} and scaling_state(pair.trunk).weights is None


def test_loss_scales_that_contradict_on_common_code_are_refused() -> None:
    for scales in (("dynamic", "dynamic"), (8.0, None), (None, "dynamic"), (8.0, 16.0)):
        with pytest.raises(ValueError, match=r"Actor with loss_scale=.* and Critic with .*same fixed number or None"):
            Pair("trunk", attach=[{"loss_scale": scale} for scale in scales])


def test_models_compiled_as_wholes_follow_dynamic_loss_scales_of_their_own() -> None:
    pair = Pair("wholes", both=True, attach=({"loss_scale": "dynamic"},) * 2)
    pair.step(0), pair.step(1)
    pair.step(1, factor=float("inf"))
    assert [train.loss_scale for train in pair.trains] == [2.0**16, 2.0**15]
    assert pair.scale_in_graphs(0) == {2.0**16} and pair.scale_in_graphs(1) == {2.0**15}


def test_the_loss_scale_of_the_options_is_that_of_all_who_share_the_code() -> None:
    pair = Pair("trunk", fp8=False)
    pair.trunk.compile(backend=UncompiledBackend(fp8_compile.Config(loss_scale=8.0)))
    pair.trains = [fp8_compile.attach(model, optimizer) for model, optimizer in zip(pair.models, pair.optimizers)]
    pair.step(0), pair.step(1, factor=float("inf"))
    assert [(train.loss_scale, train.skipped_steps) for train in pair.trains] == [(8.0, 0), (8.0, 1)]
    assert scaling_state(pair.trunk).gradient_unit == 8.0


def test_16_bit_parameters_have_masters_in_one_optimizer_only() -> None:
    pair = Pair("wholes", both=True, fp8=False)
    pair.trunk.to(torch.bfloat16)
    runs = [torch.compile(model, backend=UncompiledBackend()) for model in pair.models]
    fp8_compile.attach(runs[0], pair.optimizers[0], master_weights=True)
    with pytest.raises(
        ValueError, match="4 parameters of this SGD have FP32 masters by another.*one of the optimizers"
    ):
        fp8_compile.attach(runs[1], pair.optimizers[1], master_weights=True)
    fp8_compile.attach(runs[1], pair.optimizers[1])


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.one(x), self.two(x)


def test_one_model_with_two_optimizers_counts_steps_and_skips_by_optimizer() -> None:
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(16, D)
    compiled = torch.compile(model, backend=UncompiledBackend())
    groups = ([*model.trunk.parameters(), *model.one.parameters()], model.two.parameters())
    optimizers = [SGD(group, lr=0.1) for group in groups]
    trains = [fp8_compile.attach(compiled, optimizer, loss_scale=8.0) for optimizer in optimizers]
    for factors in ((1.0, 1.0), (float("inf"), 1.0), (1.0, 1.0)):
        model.zero_grad()
        sum(part.square().mean() * factor for part, factor in zip(compiled(x), factors)).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert [(train.steps, train.skipped_steps) for train in trains] == [(2, 1), (3, 0)]
    trains[0].detach()
    assert trains[1].loss_scale == 8.0 and scaling_state(model).gradient_unit == 8.0
    with pytest.raises(ValueError, match="TwoHeads and this SGD are attached already"):
        fp8_compile.attach(compiled, optimizers[1])
