"""The code that Inductor writes for a GPU under recipe "delayed", run: its kernels interpreted, on CPU tensors.

What comes out is compared with the graph that went in. FP8 tensors, scales, amaxes, histories and counts are equal bit
for bit, whatever the blocks are and in whatever order they run. Only sums of many elements are allowed to round
differently: the inputs are such that those of a norm in forward are exact.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from interpreted_step import (
    HEURISTIC_BLOCKS,
    LARGE_BLOCKS,
    SMALL_BLOCKS,
    Blocks,
    GeneratedGraph,
    GuardedMemory,
    compiled_for_gpu,
    copy,
)
from torch import Tensor, nn

from fp8_compile import scaling_state
from fp8_compile.kernels.delayed_scaling import ABSENT
from fp8_compile.scaling.model_state import model_state

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class SwiGLU(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(inner)
        self.gate, self.up = (nn.Linear(inner, outer, bias=False) for _ in range(2))
        self.down = nn.Linear(outer, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Gelu(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inner)
        self.up, self.down = nn.Linear(inner, outer), nn.Linear(outer, inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class SharedInput(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(inner, outer) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.query(x)) * self.key(x) + self.value(x)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and sizes. Rows that are no multiple of 16 are filled up for the gemm that contracts them."""

    model: type[nn.Module]
    dtype: torch.dtype
    rows: int
    inner: int
    outer: int
    capability: int = 90

    def __str__(self) -> str:
        sizes = f"{self.rows}x{self.inner}x{self.outer}"
        return f"{self.model.__name__}-{str(self.dtype)[6:]}-{sizes}-sm_{self.capability}"


CASES = [
    Case(SwiGLU, torch.float32, 80, 48, 96),
    Case(SwiGLU, torch.bfloat16, 64, 32, 64, capability=100),  # divided by small blocks
    Case(Gelu, torch.bfloat16, 70, 64, 96),
    Case(SharedInput, torch.bfloat16, 72, 48, 80),
    Case(Gelu, torch.bfloat16, 80, 64, 64, capability=100),  # for the biases, two tiles of rows are summed
]
SWIGLU = CASES[0]
WIDE = Case(SwiGLU, torch.float32, 20, 1040, 32)  # the norm goes over a row in steps; rows have gaps between them
RUNS = [
    *(pytest.param(case, LARGE_BLOCKS, id=f"{case}-large") for case in (*CASES, WIDE)),
    *(pytest.param(case, SMALL_BLOCKS, id=f"{case}-small, last first") for case in CASES),
    pytest.param(SWIGLU, HEURISTIC_BLOCKS, id=f"{SWIGLU}-heuristics"),
]


@dataclasses.dataclass
class Trained:
    """Three steps of a model: the first looks at each tensor, uncompiled; the other two run the generated code."""

    forward: GeneratedGraph
    backward: GeneratedGraph
    model: nn.Module
    inputs: list[tuple[Tensor, Tensor]]  # x and the gradient of the output, of each step
    results: list[dict[str, Tensor]]  # output and gradients, of each step
    slots: list[str]


@functools.cache
def trained(case: Case) -> Trained:
    torch.manual_seed(0)
    model = case.model(case.inner, case.outer).to(case.dtype)
    inputs, results = [], []
    with compiled_for_gpu(LARGE_BLOCKS, case.capability) as graphs:
        options = {"recipe": "delayed", "target": f"cuda:{case.capability}"}
        compiled = torch.compile(model, backend="fp8", options=options)
        for _ in range(3):
            x = (torch.randint(-3, 4, (case.rows, case.inner)) / 8).to(case.dtype)  # sums of squares are exact
            inputs.append((x, torch.randn_like(model(x))))
            results.append(gradients(compiled, model, *inputs[-1]))
        slots = [str(slot) for slot, _ in scaling_state(model).slots()]
    forward, backward = graphs
    assert not forward.is_backward and backward.is_backward
    return Trained(forward, backward, model, inputs, results, slots)


def gradients(function: Any, model: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(gradient)
    return {"output": y.detach(), "x": x.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


def both(graph: GeneratedGraph, inputs: list[Any], blocks: Blocks) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs and state after a run of the generated code, and of the graph, by name."""
    memory = GuardedMemory()
    actual, expected = [memory.copy(one) for one in inputs], [memory.copy(one) for one in inputs]
    outputs = graph.run(actual, blocks), graph.expected(expected)
    memory.check()
    names = [*graph.output_names(), *graph.placeholders()]
    return dict(zip(names, [*outputs[0], *actual])), dict(zip(names, [*outputs[1], *expected]))


class State:
    """The scaling state among a graph's inputs, as it is now."""

    def __init__(self, graph: GeneratedGraph, inputs: list[Any]) -> None:
        self.fields = [copy(inputs[index]) for index in graph.state()]
        self.amaxes, self.history, self.scales, self.counts, self.room = self.fields

    def same_as(self, other: State) -> bool:
        return all(same_bits(mine, its) for mine, its in zip(self.fields, other.fields))


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """A NaN may be any NaN."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    a, b = actual.double(), expected.double()
    return torch.equal(a.nan_to_num(nan=-1e300), b.nan_to_num(nan=-1e300)) and torch.equal(a.isnan(), b.isnan())


def differing(actual: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    tensors = {name: one for name, one in expected.items() if isinstance(one, Tensor)}
    return {name for name, one in tensors.items() if not same_bits(actual[name], one)}


@pytest.mark.parametrize("case, blocks", RUNS)
def test_forward_gives_the_bits_of_the_graph_in_outputs_saved_tensors_and_state(case: Case, blocks: Blocks) -> None:
    forward = trained(case).forward
    actual, expected = both(forward, forward.calls[0], blocks)
    assert any(one.dtype in FP8 for one in actual.values())
    assert ("triton_red" in forward.source) == (case is WIDE)
    assert differing(actual, expected) == set()


@pytest.mark.parametrize("case, blocks", RUNS)
def test_backward_gives_the_bits_of_the_graph_but_for_sums_over_rows(case: Case, blocks: Blocks) -> None:
    backward = trained(case).backward
    actual, expected = both(backward, backward.calls[0], blocks)
    weights = {name for name, one in actual.items() if "scaled_mm" in name}
    state = {backward.placeholders()[index] for index in backward.state()}
    different = differing(actual, expected)
    assert weights and len(state) == 5 and not different & (weights | state)
    for name in different:
        torch.testing.assert_close(actual[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_passes_in_a_row_leave_the_state_of_the_reference_bit_for_bit(case: Case) -> None:
    for graph in (trained(case).forward, trained(case).backward):
        expected, actual = ([copy(one) for one in call] for call in graph.calls)  # the first pass, and the second
        before = State(graph, actual)
        graph.expected(expected)
        assert before.same_as(State(graph, expected))
        expected = [expected[i] if i in graph.state() else copy(one) for i, one in enumerate(actual)]
        graph.run(actual, SMALL_BLOCKS)
        graph.expected(expected)
        after, recorded = State(graph, actual), before.amaxes != ABSENT
        assert after.same_as(State(graph, expected))
        assert torch.equal(after.counts[:2], before.counts[:2] + recorded)
        assert torch.equal(after.history[recorded, 1], before.amaxes[recorded]) and (after.amaxes[recorded] > 0).all()
        assert torch.equal(after.amaxes == ABSENT, ~recorded)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_slot_is_recorded_by_one_atomic(case: Case) -> None:
    sources = trained(case).forward.source, trained(case).backward.source
    atomics = [re.findall(r"tl\.atomic_max\(.*?\) \+ \((\d+)\)", source) for source in sources]
    assert [len(set(rows)) for rows in atomics] == list(map(len, atomics))
    assert sum(map(len, atomics)) == len(trained(case).slots)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_model_trained_by_the_generated_code_gets_the_gradients_of_high_precision(case: Case) -> None:
    run = trained(case)
    model = deepcopy(run.model).float()
    expected = gradients(model, model, *(one.float() for one in run.inputs[-1]))
    assert expected.keys() == run.results[-1].keys()
    for name, result in run.results[-1].items():
        assert result.dtype is case.dtype
        assert (result.float() - expected[name]).norm() < 0.15 * expected[name].norm(), name


def test_an_inf_in_a_weight_becomes_nan_and_its_amax_stays_out_of_the_history() -> None:
    forward = trained(SWIGLU).forward
    inputs = [copy(one) for one in forward.calls[1]]
    weight = next(one for one in inputs if one.shape == (SWIGLU.outer, SWIGLU.inner))
    weight[3, 5] = torch.inf
    check_overflow(forward, inputs)


def test_an_inf_in_a_gradient_becomes_nan_and_its_amax_stays_out_of_the_history() -> None:
    backward = trained(SWIGLU).backward
    inputs = [copy(one) for one in backward.calls[1]]
    inputs[-1][2, 3] = torch.inf
    check_overflow(backward, inputs)


def check_overflow(graph: GeneratedGraph, inputs: list[Any]) -> None:
    actual, expected = both(graph, inputs, SMALL_BLOCKS)
    names = {graph.placeholders()[index] for index in graph.state()}
    assert not differing(actual, expected) & names
    outputs = [actual[name] for name in graph.output_names() if actual[name] is not None]
    assert outputs[0].isnan().any() and not any(one.float().isinf().any() for one in outputs if one.dtype in FP8)
    after = State(graph, [actual[name] for name in graph.placeholders()])
    assert (after.amaxes == torch.inf).sum() == 1

    following = [copy(one) for one in graph.calls[1]]
    for index in graph.state():
        following[index] = copy(actual[graph.placeholders()[index]])
    graph.run(following, SMALL_BLOCKS)
    later = State(graph, following)
    overflowed = ~(after.amaxes < torch.inf)  # NaN in slots behind the Inf
    passes, entered = (later.counts - after.counts)[:2]
    assert torch.equal(passes, (after.amaxes != ABSENT).int())
    assert torch.equal(entered, ((after.amaxes != ABSENT) & ~overflowed).int())
    assert later.history.isfinite().all() and later.amaxes.isfinite().all()
    assert torch.equal(later.history[overflowed], after.history[overflowed])
    assert torch.equal(later.scales[:, overflowed], after.scales[:, overflowed])


def test_an_atomic_without_its_mask_would_be_found() -> None:
    forward = trained(SWIGLU).forward
    masked = r"tl\.where\([^,]+, (tl\.broadcast_to\(\w+, \[[^]]+\]\)), -1\)"
    source, changed = re.subn(masked, r"\1", forward.source)
    assert changed == forward.source.count("tl.atomic_max")
    broken = dataclasses.replace(forward, source=source)
    actual, expected = both(broken, forward.calls[0], LARGE_BLOCKS)
    assert broken.placeholders()[broken.state()[0]] in differing(actual, expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.model is Gelu], ids=str)
def test_the_kernels_that_quantize_gradients_sum_them_for_the_biases(case: Case) -> None:
    backward = trained(case).backward
    summed = r"(tl\.sum\()tl\.where\([^,]+, (tl\.broadcast_to\(\w+, \[[^]]+\]\)), 0\.0\)(, \d, keep_dims=True)"
    source, changed = re.subn(summed, r"\1\2\3", backward.source)
    assert changed == backward.source.count("keep_dims=True") == 2
    actual, expected = both(dataclasses.replace(backward, source=source), backward.calls[0], LARGE_BLOCKS)
    wrong = [name for name in differing(actual, expected) if actual[name].isnan().any()]
    assert {actual[name].shape for name in wrong} == {(case.inner,), (case.outer,)}  # without its mask, a sum is found


def test_a_store_without_its_mask_would_be_found() -> None:
    forward = trained(SWIGLU).forward
    source, changed = re.subn(r"(tl\.store\(.*), xmask & ymask\)", r"\1)", forward.source)
    assert changed
    with pytest.raises(AssertionError, match="wrote beyond its buffer"):
        both(dataclasses.replace(forward, source=source), forward.calls[0], LARGE_BLOCKS)


def test_a_buffer_that_is_read_before_it_is_written_would_be_found() -> None:
    forward = trained(SWIGLU).forward
    source, changed = re.subn(r"\n *triton_per_fused\w*\.run\(.*", "", forward.source)
    assert changed == 1
    actual, _ = both(dataclasses.replace(forward, source=source), forward.calls[0], LARGE_BLOCKS)
    assert actual[forward.output_names()[0]].isnan().all()


def test_a_loss_scale_changes_no_gradient_and_the_kernels_flag_the_largest() -> None:
    original, gradients = nn.Linear(32, 48), []
    x = torch.randn(64, 32)
    for options in ({}, {"loss_scale": 1024.0}):
        torch._dynamo.reset()
        model = deepcopy(original)
        with compiled_for_gpu(LARGE_BLOCKS):
            compiled = torch.compile(model, backend="fp8", options={"target": "cuda:90", **options})
            for _ in range(2):  # the first pass looks, the second is the compiled code
                model.zero_grad()
                compiled(x).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    loss_scale = model_state(model).fixed_loss_scale
    assert loss_scale is not None
    (largest,) = loss_scale.largest()
    assert largest == max(gradient.abs().max() for gradient in gradients[1])
