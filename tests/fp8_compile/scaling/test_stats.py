"""``stats=True``: what was saturated, what was flushed to zero, how well the rest fits, counted a second time here."""

from __future__ import annotations

import copy
import math
from typing import Any, Callable

import fp8_reference
import numpy as np
import pytest
import torch
from delayed_reference import Model, Rule
from joint_graph import copy_graph
from torch import Tensor, fx, nn
from uncompiled import CODE_ANEW, UncompiledBackend

from fp8_compile import Backend, Config, scaling_state
from fp8_compile.scaling.stats import StatsRow

D, OUT, TOKENS = 32, 48, 16
each_target = pytest.mark.parametrize("target", ["cpu", "cuda:90"])
ROLES = ("input", "weight", "grad_output")


def layer(target: str = "cpu", **options: Any) -> tuple[nn.Linear, Callable[..., Any]]:
    model = nn.Linear(D, OUT, bias=False)
    config = Config(target=target, **{"stats": True, "amax_history_len": 4, **options})
    return model, torch.compile(model, backend=UncompiledBackend(config), fullgraph=True)


def rows(model: Any) -> dict[str, StatsRow]:
    return {row.slot.removeprefix("#0."): row for row in scaling_state(model).stats()}


class Count:
    """The figures of a row, from the tensors that were quantized and the scales that were known."""

    def __init__(self, role: str, model: Model) -> None:
        self.slot = (model.backward if role == "grad_output" else model.forward).slot(role)
        self.format = self.slot.page.format
        self.elements = self.overflow = self.underflow = 0
        self.signal = self.noise = 0.0

    def add(self, tensor: Tensor) -> None:
        x, largest = fp8_reference.to_numpy(tensor, np.float32), np.float32(self.format.max)
        amax = np.abs(x).max()
        scale = self.slot.scale_for(amax)
        scaled = x * scale
        back = self.format.round(np.clip(scaled, -largest, largest)) / float(scale)
        self.elements += x.size
        self.overflow += int((np.abs(scaled) > self.format.max * (1 + 2.0**-20)).sum())  # not by roundoff of the scale
        self.underflow += int(((x != 0) & (back == 0)).sum())
        self.signal += float((x.astype(np.float64) ** 2).sum())
        self.noise += float(((x - back) ** 2).sum())
        self.slot.record(amax)

    def check(self, row: StatsRow) -> None:
        assert (row.elements, row.overflow, row.underflow) == (self.elements, self.overflow, self.underflow), row
        assert row.sqnr == pytest.approx(10 * math.log10(self.signal / self.noise), abs=1e-3)
        slot = self.slot
        assert (row.amax, row.scale) == (float(slot.entered[-1]), float(slot.quant_scale))
        assert (row.steps, row.saturated, row.small) == (slot.passes, slot.saturated, slot.small)


def spread(seed: int) -> Tensor:
    """Values over so many orders of magnitude that the small ones are flushed."""
    generator = torch.Generator().manual_seed(seed)
    exponents = 4 * torch.randn(TOKENS, D, generator=generator)
    return torch.randn(TOKENS, D, generator=generator) * torch.exp(exponents)


@each_target
def test_every_figure_is_that_of_an_independent_count_through_a_jump_and_an_underflow(target: str) -> None:
    model, compiled = layer(target)
    expected = Model(Rule(amax_history_len=4))
    counts = {role: Count(role, expected) for role in ROLES}
    batches = [torch.randn(TOKENS, D), torch.randn(TOKENS, D), 1000 * torch.randn(TOKENS, D), spread(3)]
    for number, x in enumerate(batches):
        y = compiled(x)
        grad_output = 10.0**-number * torch.randn(TOKENS, OUT)
        y.backward(grad_output)
        expected.begin_step()
        for role, tensor in (("input", x), ("weight", model.weight), ("grad_output", grad_output)):
            counts[role].add(tensor)
        expected.end_step()
    found = rows(model)
    assert set(found) == set(counts)
    for role, count in counts.items():
        count.check(found[role])
    assert found["input"].overflow > TOKENS * D // 2, "most of the batch of the jump was saturated"
    assert found["input"].underflow > 10 and found["input"].saturated == 1
    assert found["weight"].overflow == 0 and found["weight"].sqnr > 25


@each_target
def test_a_steady_tensor_has_no_overflow_and_the_noise_of_its_format(target: str) -> None:
    model, compiled = layer(target)
    x, grad_output = torch.rand(TOKENS, D) + 0.1, torch.rand(TOKENS, OUT) + 0.1
    for _ in range(3):
        compiled(x).backward(grad_output)
    found = rows(model)
    assert all(row.overflow == row.underflow == 0 for row in found.values())
    assert 28 < found["input"].sqnr < 36 and 22 < found["grad_output"].sqnr < 30
    assert [found[role].elements for role in ROLES] == [3 * TOKENS * D, 3 * OUT * D, 3 * TOKENS * OUT]


def test_what_is_not_finite_is_not_counted() -> None:
    model, compiled = layer()
    x = torch.randn(TOKENS, D)
    compiled(x).sum().backward()
    before = rows(model)["input"]
    x[0, 0], x[1, 1] = math.inf, math.nan
    compiled(x).sum().backward()
    after = rows(model)["input"]
    assert after.elements - before.elements == TOKENS * D - 2
    assert math.isfinite(after.sqnr) and after.overflow == before.overflow


def test_evaluation_is_not_counted() -> None:
    model, compiled = layer()
    compiled(torch.randn(TOKENS, D)).sum().backward()
    before = rows(model)
    with torch.no_grad():
        compiled(1000 * torch.randn(TOKENS, D))
    assert rows(model) == before


def test_reset_stats_counts_from_zero_and_keeps_the_scales() -> None:
    model, compiled = layer()
    compiled(torch.randn(TOKENS, D)).sum().backward()
    state = scaling_state(model).state_dict()
    scaling_state(model).reset_stats()
    cleared = rows(model)
    assert all(row.elements == row.overflow == row.underflow == 0 for row in cleared.values())
    assert all(math.isnan(row.sqnr) for row in cleared.values())
    after = scaling_state(model).state_dict()
    assert all(torch.equal(state[key], after[key]) for key in state)
    compiled(torch.randn(TOKENS, D)).sum().backward()
    assert rows(model)["input"].elements == TOKENS * D


def test_the_table_has_a_line_a_slot_and_says_how_much_was_saturated() -> None:
    model, compiled = layer()
    compiled(torch.randn(TOKENS, D)).sum().backward()
    compiled(1000 * torch.randn(TOKENS, D)).sum().backward()
    stats = scaling_state(model).stats()
    lines = str(stats).splitlines()
    steps, elements = ["steps", "saturated", "small"], ["elements", "overflow", "underflow"]
    assert lines[0].split() == ["slot", *steps, *elements, "amax", "scale", "SQNR", "dB"]
    assert set(lines[1]) == {"-"} and len(lines) == 2 + 3 and repr(stats) == str(stats)
    (line,) = [line for line in lines if line.startswith("#0.input")]
    overflow = next(row.overflow for row in stats if row.slot == "#0.input")
    assert f"{overflow} ({overflow / (2 * TOKENS * D):.2%})" in line
    weight = next(line for line in lines if line.startswith("#0.weight"))
    assert "%" not in weight, "nothing of the weight was lost"


def test_the_state_says_first_whether_numbers_were_lost() -> None:
    model, compiled = layer(stats=False)
    assert "recipe='delayed'" in repr(scaling_state(model)) and "of no tensors" in repr(scaling_state(model))
    compiled(torch.randn(TOKENS, D)).sum().backward()
    assert repr(scaling_state(model)) == (
        "ScalingState of 3 tensors, 1 steps; none was ever saturated or too small for its scale"
    )
    for factor in (1000, 1e-4):
        compiled(factor * torch.randn(TOKENS, D)).sum().backward()
    head, line = repr(scaling_state(model)).splitlines()
    assert head == "ScalingState of 3 tensors, 3 steps; 1 lost numbers:"
    assert line == "  #0.input was saturated in 1 of 3 steps and too small for its scale in 1 of 3 steps"


# --- off


def test_without_stats_rows_have_the_amax_and_the_scale_only() -> None:
    model, compiled = layer(stats=False)
    x = torch.randn(TOKENS, D)
    compiled(x).sum().backward()
    row = rows(model)["input"]
    assert (row.elements, row.overflow, row.underflow) == (0, 0, 0) and math.isnan(row.sqnr)
    assert row.amax == x.abs().max().item() and row.scale == pytest.approx(448 / (4 * row.amax))
    assert "nan" in str(scaling_state(model).stats())


class Recorded(UncompiledBackend):
    """Keeps the graphs that would be compiled."""

    def __init__(self, config: Config) -> None:
        self.graphs: list[fx.Graph] = []
        passes = {"post_grad_custom_pre_pass": None, "joint_custom_post_pass": self._keep}
        super().__init__(config.replace(inductor=passes))

    def _keep(self, graph: fx.Graph) -> None:
        self.graphs.append(copy_graph(graph))


def joint(stats: bool) -> list[str]:
    torch._dynamo.reset()
    backend = Recorded(Config(stats=stats))
    model = nn.Linear(D, OUT, bias=False)
    torch.compile(model, backend=backend)(torch.randn(TOKENS, D, requires_grad=True)).sum().backward()
    (graph,) = backend.graphs
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_switched_off_they_leave_nothing_in_the_graph() -> None:
    without, with_stats = joint(False), joint(True)
    assert not any("add_counts" in op or "float64" in op for op in without)
    assert with_stats.count("fp8_compile.add_counts.default") == 2, "one for forward, one for backward"
    assert len(with_stats) > len(without) + 20, "so there is something to leave out"


def test_results_do_not_depend_on_being_counted() -> None:
    found = []
    for stats in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, compiled = layer(stats=stats)
        y = compiled(torch.randn(TOKENS, D))
        y.square().sum().backward()
        found.append([y.detach(), model.weight.grad, *scaling_state(model).state_dict().values()])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_another_recipe_has_no_stats_and_says_so() -> None:
    with pytest.raises(ValueError, match="stats apply to recipe='delayed' only, got recipe='tensorwise'"):
        Config(stats=True, recipe="tensorwise")


def test_compiled_code_counts_what_the_interpreted_graph_counts() -> None:
    model = nn.Linear(D, OUT, bias=False)
    data = [torch.randn(TOKENS, D), 1000 * torch.randn(TOKENS, D), spread(1)]
    found = []
    for backend in (UncompiledBackend(Config(stats=True)), Backend(Config(stats=True, inductor=CODE_ANEW))):
        torch._dynamo.reset()
        twin = copy.deepcopy(model)
        compiled = torch.compile(twin, backend=backend)
        for x in data:
            compiled(x).backward(x[:, :1].expand(TOKENS, OUT))
        found.append(rows(twin))
    for role, row in found[0].items():
        other = found[1][role]
        assert (row.elements, row.overflow, row.underflow) == (other.elements, other.overflow, other.underflow), role
        assert (row.amax, row.scale) == (other.amax, other.scale) and row.sqnr == pytest.approx(other.sqnr, abs=1e-3)
