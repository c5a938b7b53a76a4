"""A weight is a parameter, what is computed from parameters, or what ``include`` names; all else is an activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import LEAST_DB, snr
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from uncompiled import UncompiledBackend

from fp8_compile import Config, explain
from fp8_compile.report import Report, merge

D, H = 32, 48
THREE = {"output", "grad_input", "grad_weight"}
ACTIVATIONS = "activation by activation stays in high precision"
MAKES = "makes a weight: what is computed from parameters alone stays in high precision"


def run(model: Any, *args: Tensor, **options: Any) -> tuple[Tensor, Report]:
    backend = UncompiledBackend(Config(recipe="tensorwise", **options))
    y = torch.compile(model, backend=backend)(*args)
    y.sum().backward()
    return y, merge(backend.reports, cache="off")


# Activations


class Graph(nn.Module):
    """One layer of a graph network: the adjacency matrix is data."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, H)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ self.up(x)


class Scores(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.q, self.k, self.breaks = nn.Linear(D, D), nn.Linear(D, D), breaks

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return q @ k.T


def test_a_product_with_a_matrix_that_is_data_stays_in_high_precision() -> None:
    report = explain(Graph(), (torch.randn(64, D), torch.randn(64, 64)))
    assert {row.gemm for row in report.rewritten if row.module == "up"} >= {"output", "grad_weight"}
    others = [row for row in report.rows if row.module != "up"]
    assert others and all(not row.rewritten and row.reason.startswith(ACTIVATIONS) for row in others)


def test_a_loss_that_is_compiled_by_itself_is_exact_and_its_reason_says_what_a_weight_is() -> None:
    def contrastive(a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))

    a, b = torch.randn(64, D, requires_grad=True), torch.randn(64, D, requires_grad=True)
    y, report = run(contrastive, a, b)
    torch.testing.assert_close(y, contrastive(a, b))
    assert not report.rewritten and {row.gemm for row in report.skipped} == THREE
    assert all("argument that include names" in row.reason for row in report.skipped)


def test_a_graph_break_does_not_change_the_precision_of_scores() -> None:
    x = torch.randn(64, D)
    decisions = []
    for breaks in (False, True):
        torch._dynamo.reset()
        _, report = run(Scores(breaks), x)
        decisions.append(sorted((row.shape, row.gemm, row.rewritten) for row in report.rows))
    assert decisions[0] == decisions[1]


# What include names


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.randn(D, H))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


@pytest.mark.parametrize("include, rewritten", [
    (("*",), False), (("*", "blocks.*"), False), (("*", "blocks.0"), False),
    (("*", "blocks.0.matrix"), True), (("*", "*.matrix"), True), (("blocks.?.matrix",), True),
])  # fmt: skip
def test_a_buffer_is_a_weight_where_include_names_the_buffer(include: tuple[str, ...], rewritten: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Filter()])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](x)

    report = explain(Model(), (torch.randn(64, D, requires_grad=True),), config=Config(include=include))
    assert {row.gemm for row in report.rows} == {"output", "grad_input"}
    assert {row.rewritten for row in report.rows} == {rewritten}, str(report)
    assert {row.weight for row in report.rows} == {"blocks.0.matrix" if rewritten else ""}


def test_an_argument_of_a_function_is_a_weight_where_include_names_it() -> None:
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    x, w = torch.randn(64, D, requires_grad=True), torch.randn(D, H, requires_grad=True)
    y, report = run(product, x, w, include=("*", "w"))
    assert {row.gemm for row in report.rewritten} == THREE and not report.skipped
    assert snr(y, x @ w) > LEAST_DB


# Weights that are computed


class Merged(nn.Module):
    """LoRA, merged in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, D))
        self.a, self.b = nn.Parameter(torch.randn(16, D)), nn.Parameter(torch.randn(H, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.b @ self.a)


class Rotated(nn.Module):
    """The weight is turned by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, D))
        self.register_buffer("turn", torch.linalg.qr(torch.randn(D, D))[0])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight @ self.turn)


def orthogonal(map: str, base: bool) -> nn.Module:
    return parametrizations.orthogonal(nn.Linear(D, D, bias=False), orthogonal_map=map, use_trivialization=base)


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "orthogonal, matrix_exp": lambda: orthogonal("matrix_exp", True),
    "orthogonal, cayley": lambda: orthogonal("cayley", True),
    "orthogonal, householder": lambda: orthogonal("householder", False),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(D, H, bias=False)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(D, H, bias=False)).eval(),
    "merged": Merged,
    "turned": Rotated,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_makes_a_weight_is_exact_and_the_product_with_it_runs_in_fp8(name: str) -> None:
    model, x = COMPUTED[name](), torch.randn(64, D, requires_grad=True)
    y, report = run(model, x)
    assert {row.gemm for row in report.rewritten} == THREE and len(report.rewritten) == 3, str(report)
    assert all(row.reason == MAKES for row in report.skipped), str(report)
    assert snr(y, model(x)) > LEAST_DB


@pytest.mark.parametrize("name", ["orthogonal, matrix_exp", "orthogonal, cayley", "merged", "turned"])
def test_a_computed_weight_and_the_way_back_to_its_parameters_are_those_of_eager(name: str) -> None:
    """The gradient of the computed weight is given, so that no rounding of FP8 comes in but by its computation."""

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = COMPUTED[name]()

        def forward(self, eye: Tensor) -> Tensor:
            inner = self.inner
            if parametrize.is_parametrized(inner):
                return inner.weight * eye.sum()
            return (inner.b @ inner.a if isinstance(inner, Merged) else inner.weight @ inner.turn) * eye.sum()

    model, one = Seen(), torch.ones(1)
    y, report = run(model, one)
    found = {key: parameter.grad.clone() for key, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    expected = model(one)
    expected.sum().backward()
    torch.testing.assert_close(y, expected)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, dict(model.named_parameters())[key].grad, msg=key)
    assert not report.rewritten and {row.reason for row in report.skipped} == {MAKES}
