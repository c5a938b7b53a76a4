"""Fifty training steps of two layers beside an independent simulation: every scale and history bit for bit.

The tensors that meet FP8 are seen from outside: the hidden activation is an output, and the gradient at a layer's
output is that of a probe of zeros added there. From them the simulation derives all scales, and with those scales the
products, so that a scale that is right but used a pass too early or too late is found too.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import pytest
import torch
from delayed_reference import Layer, Model, Rule
from torch import Tensor, nn
from uncompiled import CODE_ANEW, UncompiledBackend

from fp8_compile import Backend, Config, scaling_state

TOKENS, WIDTH, HIDDEN, OUT = 16, 32, 48, 16
STEPS = 50
ZEROS, INF, NAN, JUMP = 7, 13, 19, 29  # steps with a batch of zeros, an Inf, a NaN, and from then on 1000x


class Probed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, OUT, bias=False)

    def forward(self, x: Tensor, probe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        before = self.up(x) + probe
        hidden = torch.relu(before)
        return before, hidden, self.down(hidden)


def batch(step: int, first_zero: bool) -> Tensor:
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))
    x = x * (1 + step % 5)
    if step == ZEROS or (first_zero and step == 0):
        x.zero_()
    if step in (INF, NAN):
        x[3, 5] = torch.inf if step == INF else torch.nan
    return x * 1000 if step >= JUMP else x


@dataclasses.dataclass
class Simulation:
    """Two layers of the reference beside a compiled model."""

    compiled: Callable[..., Any]
    model: Probed
    rule: Rule

    def __post_init__(self) -> None:
        self.expected = Model(self.rule)
        self.up, self.down = Layer(self.expected), Layer(self.expected)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.skipped = 0

    def step(self, x: Tensor) -> None:
        probe = torch.zeros(TOKENS, HIDDEN, requires_grad=True)
        before, hidden, y = self.compiled(x, probe)
        grad_output = (y.detach() - 1) / y.detach().abs().max().clamp(min=1)
        y.backward(grad_output)
        self.expected.begin_step()
        self.up.forward(x, self.model.up.weight).check(before)
        self.down.forward(hidden, self.model.down.weight).check(y)
        grad_hidden, grad_down = self.down.backward(grad_output)
        grad_hidden.check(probe.grad, where=(before.detach() > 0).numpy())
        grad_down.check(self.model.down.weight.grad)
        _, grad_up = self.up.backward(probe.grad)
        grad_up.check(self.model.up.weight.grad)
        self.expected.end_step()
        if all(parameter.grad.isfinite().all() for parameter in self.model.parameters()):
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        else:
            self.skipped += 1  # as a loss scaler would
        self.optimizer.zero_grad()

    def check_state(self, step: int) -> None:
        found = scaling_state(self.model).state_dict()
        expected = self.up.saved("up") | self.down.saved("down")
        assert set(found) == set(expected)
        wrong = [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]
        assert not wrong, f"after step {step}: " + "; ".join(f"{key} {found[key]} {expected[key]}" for key in wrong)


def simulate(backend: Any, rule: Rule, *, look_every: int = 1, first_zero: bool = False) -> None:
    model = Probed()
    run = Simulation(torch.compile(model, backend=backend, fullgraph=True), model, rule)
    for step in range(STEPS):
        run.step(batch(step, first_zero))
        if (step + 1) % look_every == 0:
            run.check_state(step)
    assert [report.recipe for report in backend.reports] == ["delayed"]
    assert sum(row.rewritten for row in backend.reports[0].rows) == 5
    assert any(slot.saturated for slot in run.expected.forward.slots), "the jump gave room to all slots"
    assert run.skipped == 2, "the Inf and the NaN reached the gradients, and nothing else was lost"


def config(rule: Rule, **options: Any) -> Config:
    return Config(**dataclasses.asdict(rule), **options)


# Each two values of two options meet in one of these.
RULES = [
    Rule("max", 0, 16, 1), Rule("max", 2, 1, 3), Rule("max", -1, 16, 3),
    Rule("most_recent", 0, 1, 3), Rule("most_recent", 2, 16, 1), Rule("most_recent", -1, 1, 1),
    Rule("p99", 0, 16, 3), Rule("p99", 2, 16, 3), Rule("p99", -1, 16, 1), Rule("p99", 0, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_on_a_cpu_scales_and_histories_are_the_simulations_after_every_step(rule: Rule) -> None:
    simulate(UncompiledBackend(config(rule)), rule)


@pytest.mark.parametrize("rule", [RULES[1], RULES[4], RULES[7]], ids=str)
def test_for_a_gpu_scales_and_histories_are_the_simulations_after_every_step(rule: Rule) -> None:
    simulate(UncompiledBackend(config(rule, target="cuda:90")), rule)


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_looking_at_the_state_or_not_changes_nothing_of_it(target: str) -> None:
    """Looking does the pending update early; without it the next pass does."""
    simulate(UncompiledBackend(config(RULES[6], target=target)), RULES[6], look_every=25)


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_a_first_batch_of_zeros_gives_no_scale_and_the_next_batch_gives_its_own(target: str) -> None:
    simulate(UncompiledBackend(config(RULES[0], target=target)), RULES[0], first_zero=True)


def test_a_very_long_history_has_its_percentile_between_two_amaxes() -> None:
    rule = Rule("p99", 0, 150, 1)
    simulate(UncompiledBackend(config(rule)), rule, look_every=10)


def test_compiled_code_has_the_simulations_scales_and_histories() -> None:
    rule = Rule("p99", 1, 4, 3)
    simulate(Backend(config(rule, inductor=CODE_ANEW)), rule)
