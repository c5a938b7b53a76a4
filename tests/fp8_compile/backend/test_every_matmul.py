"""Whoever writes a matmul, and however: its three gemms run in FP8 with the right numbers, or say why not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import LEAST_DB, snr, train
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.pytorch_utils import Conv1D
from uncompiled import UncompiledBackend

from fp8_compile import Config, Report

D, H = 32, 48
THREE = ("output", "grad_input", "grad_weight")


class Param(nn.Module):
    """``function(x, *weights)`` with the weights as parameters ``w0``, ``w1``, ..."""

    def __init__(self, function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for index, shape in enumerate(shapes):
            self.register_parameter(f"w{index}", nn.Parameter(torch.randn(shape) / 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, *self.parameters())


class Before(nn.Module):
    """A linear layer after some view of its input."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.view, self.linear = view, nn.Linear(D, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.view(x))


def decisions(report: Report) -> set[tuple[str, str, str]]:
    return {(row.module, row.gemm, row.decision) for row in report.rows}


def rewritten(*modules: str) -> set[tuple[str, str, str]]:
    return {(module, gemm, "rewritten") for module in modules for gemm in THREE}


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


ONE_WEIGHT: dict[str, tuple[Callable[[], nn.Module], Sequence[int]]] = {
    "F.linear": (lambda: Param(lambda x, w: F.linear(x, w), (H, D)), (24, D)),
    "x @ w": (lambda: Param(lambda x, w: x @ w, (D, H)), (24, D)),
    "w @ x": (lambda: Param(lambda x, w: w @ x, (H, D)), (D, 24)),
    "mm": (lambda: Param(torch.mm, (D, H)), (24, D)),
    "mm of transposed views": (lambda: Param(lambda x, w: torch.mm(x.t(), w.t()), (H, D)), (D, 24)),
    "addmm with a vector": (
        lambda: Param(lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0), (D, H), (H,)),
        (24, D),
    ),
    "addmm with a matrix": (
        lambda: Param(lambda x, w, b: torch.addmm(b, x, w, beta=3.0, alpha=0.25), (D, H), (24, H)),
        (24, D),
    ),
    "addmm with beta=0": (
        lambda: Param(lambda x, w, b: torch.addmm(b, x, w, beta=0) + b.mean(), (D, H), (H,)),
        (24, D),
    ),
    "matmul 3-D by 2-D": (lambda: Param(torch.matmul, (D, H)), (2, 12, D)),
    "matmul vector by 2-D": (lambda: Param(torch.matmul, (D, H)), (D,)),
    "bmm with a stack of experts": (lambda: Param(torch.bmm, (2, D, H)), (2, 12, D)),
    "baddbmm": (
        lambda: Param(lambda x, w, b: torch.baddbmm(b, x, w, beta=0.5, alpha=2.0), (2, D, H), (2, 1, H)),
        (2, 12, D),
    ),
    "matmul of broadcast experts": (lambda: Param(torch.matmul, (2, D, H)), (1, 1, 12, D)),
    "einsum of experts": (lambda: Param(lambda x, w: torch.einsum("ecd,edf->ecf", x, w), (2, D, H)), (2, 12, D)),
    "einsum of heads": (lambda: Param(lambda x, w: torch.einsum("btd,dhk->bthk", x, w), (D, 2, 24)), (2, 12, D)),
    "einsum over heads": (lambda: Param(lambda x, w: torch.einsum("bthk,hkd->btd", x, w), (2, 16, H)), (2, 12, 2, 16)),
    "Hugging Face Conv1D": (lambda: Conv1D(H, D), (2, 12, D)),
}


@pytest.mark.parametrize("case", ONE_WEIGHT)
def test_product_with_a_parameter_runs_in_fp8_forward_and_backward(case: str) -> None:
    make, shape = ONE_WEIGHT[case]
    result = train(make(), x(*shape))
    assert min(result.snr.values()) > LEAST_DB, result.snr
    assert result.snr["output"] < 60, "nothing was rounded to FP8"
    assert decisions(result.report) == rewritten("")
    assert len(result.report.rows) == 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(D,), (5, D), (3, 5, D), (2, 3, 5, D)], ids=lambda shape: f"{len(shape)}-D")
def test_linear_takes_inputs_of_one_to_four_dimensions(shape: tuple[int, ...], bias: bool) -> None:
    result = train(nn.Linear(D, H, bias=bias), x(*shape))
    assert min(result.snr.values()) > LEAST_DB, result.snr
    assert decisions(result.report) == rewritten("")
    tokens = torch.Size(shape[:-1]).numel()
    assert {row.gemm: row.shape for row in result.report.rows} == {
        "output": (tokens, H, D),
        "grad_input": (tokens, D, H),
        "grad_weight": (H, D, tokens),
    }


NON_CONTIGUOUS = {
    "transposed": (lambda x: x.t(), (D, 24)),
    "every other row": (lambda x: x[::2], (24, D)),
    "some columns": (lambda x: x[:, 4 : 4 + D], (24, D + 8)),
    "every other column": (lambda x: x[:, ::2], (24, 2 * D)),
    "expanded": (lambda x: x.expand(24, D), (1, D)),
    "flipped": (lambda x: x.flip(0), (24, D)),
    "permuted 4-D": (lambda x: x.permute(0, 2, 3, 1), (2, D, 3, 4)),
}


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
@pytest.mark.parametrize("case", NON_CONTIGUOUS)
def test_strides_of_the_input_do_not_matter(case: str, target: str) -> None:
    view, shape = NON_CONTIGUOUS[case]
    result = train(Before(view), x(*shape), Config(target=target))
    assert min(result.snr.values()) > LEAST_DB, result.snr
    assert decisions(result.report) == rewritten("linear")


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_strides_of_the_weight_do_not_matter(target: str) -> None:
    model = nn.Linear(D, H)
    model.weight = nn.Parameter(torch.randn(D, H).t() / 4)  # column-major
    result = train(model, x(24, D), Config(target=target))
    assert min(result.snr.values()) > LEAST_DB, result.snr
    assert decisions(result.report) == rewritten("")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_stay_half_precision(dtype: torch.dtype, recipe: str) -> None:
    result = train(nn.Linear(D, H).to(dtype), x(16, D).to(dtype), Config(recipe=recipe))
    assert min(result.snr.values()) > LEAST_DB, result.snr
    assert decisions(result.report) == rewritten("")


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_to_bf16_multiplies_in_fp8_and_keeps_fp32_gradients(inside: bool) -> None:
    model, backend = nn.Sequential(nn.Linear(D, H), nn.ReLU()), UncompiledBackend()
    reference, data = copy.deepcopy(model), x(16, D)

    def forward(data: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(data)

    if inside:
        y = torch.compile(forward, backend=backend, fullgraph=True)(data)
    else:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.compile(model, backend=backend, fullgraph=True)(data)
    y.float().square().sum().backward()
    reference(data).square().sum().backward()
    assert y.dtype == torch.bfloat16 and model[0].weight.grad.dtype == torch.float32
    assert snr(y.float(), reference(data)) > LEAST_DB
    assert snr(model[0].weight.grad, reference[0].weight.grad) > LEAST_DB
    (report,) = backend.reports
    assert decisions(report) == {("0", "output", "rewritten"), ("0", "grad_weight", "rewritten")}


def test_layers_that_feed_each_other_directly_are_all_rewritten() -> None:
    """Two-dimensional data: no view stands between the first matmul and the second, forward and backward."""
    model = nn.Sequential(nn.Linear(D, H), nn.Linear(H, D), nn.Linear(D, D))
    result = train(model, x(16, D))
    assert decisions(result.report) == rewritten("0", "1", "2")
    assert result.snr["output"] > LEAST_DB
    assert min(result.snr.values()) > LEAST_DB - 4, result.snr  # three layers of noise


def test_a_layer_called_twice_sums_the_gradients_of_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.tanh(self.layer(x)))

    result = train(Twice(), x(3, 8, D))
    assert min(result.snr.values()) > LEAST_DB - 4, result.snr
    gemms = sorted(row.gemm for row in result.report.rewritten)
    assert gemms == sorted(THREE * 2) and {row.module for row in result.report.rows} == {"layer"}


def test_tied_weights_get_the_gradient_of_both_uses() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mid = nn.Embedding(64, D), nn.Linear(D, D)
            self.out = nn.Linear(D, 64, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.mid(self.embed(ids)))

    config = Config(include=("*", "out"))  # a head, unless it is asked for
    result = train(Tied(), torch.randint(0, 64, (2, 12)), config)
    assert min(result.snr.values()) > LEAST_DB, result.snr
    assert decisions(result.report) == rewritten("mid", "out")


class Attention(nn.Module):
    def __init__(self, *, need_weights: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.need_weights, self.cross = need_weights, cross
        self.attn = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x.flip(1) if self.cross else x
        return self.attn(x, memory, memory, need_weights=self.need_weights)[0]


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_multihead_attention_trains_its_projections_and_keeps_its_scores(need_weights: bool, cross: bool) -> None:
    result = train(Attention(need_weights=need_weights, cross=cross), 2 * x(2, 8, D))
    assert min(result.snr.values()) > LEAST_DB - 6, result.snr
    assert result.snr["output"] > LEAST_DB
    projections = 3 if cross else 2  # query, key and value in one product or in two, and out
    counts = {gemm: sum(row.gemm == gemm for row in result.report.rewritten) for gemm in THREE}
    assert counts == dict.fromkeys(THREE, projections)
    assert result.report.skipped
    assert all("activation by activation stays in high precision" in row.reason for row in result.report.skipped)


class BatchedScores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q(x) @ self.k(x).transpose(1, 2)


def test_scores_of_activations_stay_in_high_precision_with_that_reason() -> None:
    result = train(BatchedScores(), x(2, 8, D))
    assert {(row.gemm, row.reason) for row in result.report.skipped} == {
        (gemm, "activation by activation stays in high precision") for gemm in THREE
    }
    assert {row.module for row in result.report.rewritten} == {"q", "k"} and len(result.report.rewritten) == 6


@pytest.mark.parametrize("batch", [1, 2])
def test_scores_of_tensors_that_come_in_stay_in_high_precision_whatever_the_batch(batch: int) -> None:
    """After a graph break, query and key are inputs of the graph."""
    backend = UncompiledBackend()

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.bmm(q, k.transpose(1, 2))

    q, k = x(batch, 24, D), x(batch, 24, D)
    torch.testing.assert_close(torch.compile(scores, backend=backend)(q, k), scores(q, k))
    (report,) = backend.reports
    assert [row.reason for row in report.rows] == ["activation by activation stays in high precision"]


COMPUTED_WEIGHTS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(D, D)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(D, D)),
    "pruned by a mask": lambda: prune.random_unstructured(nn.Linear(D, D), "weight", amount=0.3),
    "scaled": lambda: Param(lambda x, w, g: F.linear(x, w * g), (D, D), (D, 1)),
    "low rank": lambda: Param(lambda x, a, b: F.linear(x, a @ b), (D, 16), (16, D)),
}


@pytest.mark.parametrize("case", COMPUTED_WEIGHTS)
def test_weight_computed_from_parameters_is_a_weight(case: str) -> None:
    """In the second layer, so that not even the input tells that this is a linear layer."""
    model, backend = nn.Sequential(nn.Linear(D, D), nn.Tanh(), COMPUTED_WEIGHTS[case]()), UncompiledBackend()
    data = x(12, D)
    y = torch.compile(model, backend=backend, fullgraph=True)(data)
    y.square().mean().backward()
    assert snr(y, model(data)) > LEAST_DB
    (report,) = backend.reports
    assert {row.gemm for row in report.rewritten if row.module.startswith("2")} == set(THREE), str(report)


def test_product_with_a_buffer_is_left_alone_with_that_reason() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(D, D)
            self.register_buffer("basis", torch.randn(D, D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x).relu() @ self.basis

    result = train(Projected(), x(16, D))
    assert {row.module for row in result.report.rewritten} == {"up"}
    assert {row.gemm for row in result.report.skipped} == {"output", "grad_input"}
    reason = "product with a buffer or a constant, not with a parameter"
    assert {row.reason for row in result.report.skipped} == {reason}


def test_frozen_layer_has_no_grad_weight() -> None:
    model = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, D))
    model[2].requires_grad_(False)
    result = train(model, x(16, D))
    assert decisions(result.report) == rewritten("0", "2") - {("2", "grad_weight", "rewritten")}
    assert min(result.snr.values()) > LEAST_DB - 3, result.snr


def test_first_layer_has_no_grad_input_when_the_data_needs_none() -> None:
    backend = UncompiledBackend()
    torch.compile(nn.Linear(D, H), backend=backend)(x(16, D)).sum().backward()
    assert decisions(backend.reports[0]) == {("", "output", "rewritten"), ("", "grad_weight", "rewritten")}


@pytest.mark.parametrize("field, kept", [
    ("quantize_inputs", {"output", "grad_weight"}),
    ("quantize_weights", {"output", "grad_input"}),
    ("quantize_gradients", {"grad_input", "grad_weight"}),
])
def test_gemm_with_an_operand_that_stays_whole_is_skipped_and_exact(field: str, kept: set[str]) -> None:
    result = train(nn.Linear(D, H, bias=False), x(16, D), Config(**{field: False}))
    assert {row.gemm: row.reason for row in result.report.skipped} == dict.fromkeys(kept, f"{field}=False")
    of_gemm = {"output": "output", "grad_input": "x", "grad_weight": "weight"}
    for gemm, name in of_gemm.items():
        assert (result.snr[name] > 100) == (gemm in kept), result.snr


@pytest.mark.usefixtures("without_onednn")
def test_rows_carry_the_formats_of_both_operands() -> None:
    def formats(**options: Any) -> dict[str, tuple[str, ...]]:
        return {row.gemm: row.formats for row in train(nn.Linear(D, H), x(16, D), Config(**options)).report.rows}

    assert formats() == {"output": ("e4m3", "e4m3"), "grad_input": ("e5m2", "e4m3"), "grad_weight": ("e5m2", "e4m3")}
    assert set(formats(recipe="rowwise").values()) == {("e4m3", "e4m3")}
    assert formats(target="hip:gfx942")["grad_input"] == ("e5m2fnuz", "e4m3fnuz")
