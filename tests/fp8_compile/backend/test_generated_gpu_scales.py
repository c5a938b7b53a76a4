"""The code that Inductor writes for a GPU under recipes with many scales, run: its kernels and ours interpreted.

What comes out is compared with the graph that went in: FP8 tensors and scales are equal bit for bit, whatever the
blocks are and in whatever order they run, with sizes that no block divides. All in FP32: of a bf16 tensor that is never
in memory Inductor takes the amax before it is rounded.
"""

from __future__ import annotations

import dataclasses
import functools
from copy import deepcopy
from typing import Any

import pytest
import torch
from interpreted_step import LARGE_BLOCKS, SMALL_BLOCKS, Blocks, GeneratedGraph, GuardedMemory, compiled_for_gpu, copy
from torch import Tensor, nn

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Mlp(nn.Module):
    """What is computed (an activation), and what is in memory: weights, the input, a gemm's result, gradients."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inner, outer), nn.Linear(outer, inner, bias=False)
        self.out = nn.Linear(inner, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(nn.functional.silu(self.up(x))))


@dataclasses.dataclass(frozen=True)
class Case:
    recipe: str
    target: str
    rows: int
    inner: int
    outer: int
    kernels: frozenset[str]  # of ours

    def __str__(self) -> str:
        return f"{self.recipe}-{self.target}-{self.rows}x{self.inner}x{self.outer}"


BLOCKS = frozenset({"quantize_blocks_kernel"})
ROWS = frozenset({"row_column_amax_kernel", "cast_rows_columns_kernel"})
CASES = [
    Case("blockwise", "cuda:90", 40, 128, 256, BLOCKS),  # 40 rows are filled up to 128
    Case("rowwise", "cuda:100", 72, 48, 80, ROWS),
]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_order = pytest.mark.parametrize("blocks", [LARGE_BLOCKS, SMALL_BLOCKS], ids=["large", "small, last first"])


@dataclasses.dataclass
class Trained:
    forward: GeneratedGraph
    backward: GeneratedGraph
    model: nn.Module
    inputs: tuple[Tensor, Tensor]  # x and the gradient of the output
    results: dict[str, Tensor]  # output and gradients


@functools.cache
def trained(case: Case) -> Trained:
    torch.manual_seed(0)
    model = Mlp(case.inner, case.outer)
    x, gradient = torch.randn(2, case.rows, case.inner)
    with compiled_for_gpu(LARGE_BLOCKS, int(case.target.partition(":")[2])) as graphs:
        compiled = torch.compile(model, backend="fp8", options={"recipe": case.recipe, "target": case.target})
        results = gradients(compiled, model, x, gradient)
    forward, backward = graphs
    return Trained(forward, backward, model, (x, gradient), results)


def gradients(function: Any, model: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(gradient)
    return {"output": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def both(graph: GeneratedGraph, inputs: list[Any], blocks: Blocks) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs of the generated code, and of the graph, by name."""
    memory = GuardedMemory()
    outputs = graph.run([memory.copy(one) for one in inputs], blocks), graph.expected([copy(one) for one in inputs])
    memory.check()
    return dict(zip(graph.output_names(), outputs[0])), dict(zip(graph.output_names(), outputs[1]))


def differing(actual: dict[str, Any], expected: dict[str, Any]) -> set[str]:
    """A NaN may be any NaN."""
    tensors = {name: one for name, one in expected.items() if isinstance(one, Tensor)}
    return {name for name, one in tensors.items() if not same_bits(actual[name], one)}


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    a, b = actual.double(), expected.double()
    return torch.equal(a.nan_to_num(nan=-1e300), b.nan_to_num(nan=-1e300)) and torch.equal(a.isnan(), b.isnan())


@each_case
def test_forward_gives_the_bits_of_the_graph_in_its_output_and_in_what_it_saves(case: Case) -> None:
    forward = trained(case).forward
    actual, expected = both(forward, forward.calls[0], SMALL_BLOCKS)
    assert all(f"def {kernel}(" in forward.source for kernel in case.kernels)
    saved = [one for one in actual.values() if isinstance(one, Tensor) and one.dtype in FP8]
    assert len(saved) >= 5  # of three weights and two inputs
    assert differing(actual, expected) == set()


@each_order
@each_case
def test_backward_gives_the_bits_of_the_graph_but_for_sums_over_rows(case: Case, blocks: Blocks) -> None:
    backward = trained(case).backward
    actual, expected = both(backward, backward.calls[0], blocks)
    assert all(f"def {kernel}(" in backward.source for kernel in case.kernels)
    weights = {name for name, one in actual.items() if isinstance(one, Tensor) and one.dim() == 2}
    different = differing(actual, expected)
    assert weights and not different & weights
    for name in different:
        torch.testing.assert_close(actual[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")


@each_case
def test_a_model_trained_by_the_generated_code_gets_the_gradients_of_high_precision(case: Case) -> None:
    run = trained(case)
    model = deepcopy(run.model)
    model.zero_grad()
    expected = gradients(model, model, *run.inputs)
    assert expected.keys() == run.results.keys()
    for name, result in run.results.items():
        assert (result - expected[name]).norm() < 0.15 * expected[name].norm(), name


@each_case
def test_an_inf_in_a_gradient_is_seen_in_what_comes_out(case: Case) -> None:
    backward = trained(case).backward
    inputs = [copy(one) for one in backward.calls[0]]
    inputs[-1][5, 3] = torch.inf
    actual, expected = both(backward, inputs, LARGE_BLOCKS)
    assert sum(one.isnan().any() for one in actual.values() if isinstance(one, Tensor)) >= 2
    weights = {name for name, one in actual.items() if isinstance(one, Tensor) and one.dim() == 2}
    assert not differing(actual, expected) & weights
