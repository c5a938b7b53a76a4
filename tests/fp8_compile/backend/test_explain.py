"""explain() says what would happen and changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx
from uncompiled import UncompiledBackend

import fp8_compile.backend.explain as explaining
from fp8_compile import Config, Report, explain
from fp8_compile.passes.joint.delay_scales import DelayScales

D = 32
THREE = ("output", "grad_input", "grad_weight")


class Plain(nn.Module):
    """Everything that a forward changes: running statistics, random numbers, a counter, a tensor kept in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.drop, self.down = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5), nn.Linear(D, D)
        self.calls, self.seen = 0, {"sum": torch.zeros(D)}

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor, *, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        self.calls += 1
        self.seen["sum"].add_(x.detach().sum(0))
        return self.down(self.drop(self.middle(self.norm(self.up(x))))) * scale


class Broken(Plain):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x


class LooksAtValues(Plain):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.sum() > 0 else x


class Selects(Plain):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x[(x[:, 0] > 0).nonzero().squeeze(1)]


class Counts(Plain):
    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.shape[0] if int(self.norm.num_batches_tracked) < 5 else x


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("kind", [Plain, Broken, LooksAtValues, Selects, Counts])
def test_nothing_is_changed_and_every_matmul_is_listed(kind: type[Plain]) -> None:
    model, x = kind(), torch.randn(8, D, requires_grad=True)
    before, random_state = everything(model), torch.get_rng_state()
    report = explain(model, args=(x,))
    wanted = {(name, gemm) for name in ("up", "down") for gemm in THREE}
    assert {(row.module, row.gemm) for row in report.rewritten} == wanted
    assert report.cache == "not compiled"
    for name, tensor in model.state_dict().items():
        assert torch.equal(before[name], tensor), name
    assert torch.equal(random_state, torch.get_rng_state())
    assert x.grad is None and all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [Plain, LooksAtValues])
def test_what_the_model_keeps_outside_its_buffers_is_not_changed_either(kind: type[Plain]) -> None:
    model = kind()
    explain(model, args=(torch.ones(8, D),))
    assert model.calls == 0 and torch.equal(model.seen["sum"], torch.zeros(D))
    assert type(model.seen["sum"]) is torch.Tensor


def test_a_compiled_model_is_explained_like_the_plain_one_and_stays_compiled() -> None:
    model, x, backend = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)).eval(), torch.randn(8, D), UncompiledBackend()
    compiled = torch.compile(model, backend=backend)
    expected = compiled(x)
    assert explain(compiled, (x,)).rows == explain(model, (x,)).rows
    torch.testing.assert_close(compiled(x), expected)
    assert len(backend.reports) == 1, "explaining made the compiled model compile again"


def test_keyword_arguments_reach_the_model() -> None:
    scale = torch.ones(D, requires_grad=True)
    report = explain(Plain(), (torch.randn(8, D),), {"scale": scale})
    assert len(report.rewritten) == 5 and scale.grad is None
    with pytest.raises(Exception, match="no_such"):
        explain(Plain(), (torch.randn(8, D),), {"no_such": 1})


def test_one_tensor_may_stand_for_the_arguments() -> None:
    assert explain(nn.Linear(D, D), torch.randn(8, D)).rows == explain(nn.Linear(D, D), (torch.randn(8, D),)).rows


def test_a_function_is_explained_with_the_parameters_it_sees() -> None:
    layer, weight = nn.Linear(D, D), nn.Parameter(torch.randn(D, D))
    report = explain(lambda x: torch.tanh(layer(x)) @ weight, (torch.randn(8, D),))
    assert [row.gemm for row in report.rewritten].count("output") == 2
    assert layer.weight.grad is None


def test_without_gradients_only_the_output_is_listed() -> None:
    with torch.no_grad():
        assert {row.gemm for row in explain(Plain().eval(), (torch.randn(8, D),)).rows} == {"output"}


def test_sizes_are_those_given_not_those_of_an_earlier_call() -> None:
    model = nn.Linear(D, D)
    shapes = [explain(model, (torch.randn(tokens, D),)).rows[0].shape for tokens in (8, 24, 5)]
    assert shapes == [(8, D, D), (24, D, D), (5, D, D)]


def test_the_config_decides() -> None:
    config = Config(recipe="rowwise", target="cuda:90", exclude="up")
    report = explain(Plain(), (torch.randn(8, D),), config=config)
    assert (report.recipe, report.target) == ("rowwise", "cuda:90")
    assert {row.module: row.decision for row in report.rows} == {"up": "skipped", "down": "rewritten"}


def test_what_would_be_an_error_is_a_row_with_the_reason() -> None:
    report = explain(nn.Linear(D, D).double(), (torch.randn(8, D).double(),))
    assert {row.reason for row in report.rows} == {"dtype float64: expected float32, bfloat16 or float16"}
    report = explain(nn.Linear(D, D), (torch.randn(8, D),), config=Config(recipe="blockwise", target="hip:gfx942"))
    assert {row.reason for row in report.rows} == {"hip:gfx942 has no blockwise FP8 gemm"}


def test_graphs_are_counted() -> None:
    assert explain(Plain(), (torch.randn(8, D),)).graphs == 1
    assert explain(Broken(), (torch.randn(8, D),)).graphs == 2


def test_the_report_of_a_real_model_survives_json() -> None:
    x = torch.randn(8, D)
    torch._dynamo.mark_dynamic(x, 0)
    report = explain(Plain(), (x,))
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize("thing", [3, None, "model"])
def test_what_is_no_model_is_a_type_error(thing: Any) -> None:
    with pytest.raises(TypeError, match="explain expects a module or a function, got"):
        explain(thing)


def test_large_models_are_explained_without_memory_for_their_activations() -> None:
    """16 GB of activations if it ran; parameters on the meta device would be real in a user's hands."""
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 1024, bias=False))
    x = torch.empty(1, 1024).expand(2**21, 1024)
    assert explain(model, (x,)).rows[0].shape == (2**21, 1024, 1024)


class Twice(Plain):
    """Has a subgraph: a branch is chosen when the model runs."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.relu(), lambda x: x * 2, (x,))


@pytest.mark.parametrize("kind", [Plain, Broken, Twice])
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_the_rows_are_those_of_a_graph_that_goes_all_the_way(
    kind: type[Plain], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = explain(kind(), (torch.randn(64, D),), config=Config(recipe=recipe))
    monkeypatch.setattr(explaining, "stop_after_joint", explaining.run_uncompiled)
    whole = explain(kind(), (torch.randn(64, D),), config=Config(recipe=recipe))
    assert quick.rows == whole.rows and len(quick.rewritten) == 5  # no gradient of the input


def test_nothing_is_done_once_the_rows_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("not needed for a report")

    monkeypatch.setattr(compile_fx, "min_cut_rematerialization_partition", fails)
    monkeypatch.setattr(DelayScales, "run", fails)
    assert len(explain(Plain(), (torch.randn(64, D),)).rewritten) == 5
