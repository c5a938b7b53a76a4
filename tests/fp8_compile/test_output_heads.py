"""Output heads are found by their tie to an embedding, by their width, or by their names, in every graph of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_of import ModuleOf
from torch import Tensor, nn
from uncompiled import UncompiledBackend

from fp8_compile import Config, explain
from fp8_compile.report import Report, merge

D, VOCABULARY = 32, 96
INCLUDE = " (name it in include to rewrite it)"
WIDE = f"excluded: output head, as wide as the vocabulary of wte{INCLUDE}"
TIED = f"excluded: output head, tied to the embedding wte{INCLUDE}"
IDS = torch.randint(0, VOCABULARY, (2, 16))


class Model(nn.Module):
    """Tokens -> layers -> a head called ``name``."""

    def __init__(self, name: str = "output", *, tied: bool = False, breaks: bool = False, middle: int = D) -> None:
        super().__init__()
        self.wte, self.up, self.down = nn.Embedding(VOCABULARY, D), nn.Linear(D, middle), nn.Linear(middle, D)
        self.add_module(name, nn.Linear(D, VOCABULARY, bias=False))
        self.name, self.breaks = name, breaks
        if tied:
            self.get_submodule(name).weight = self.wte.weight

    def hidden(self, ids: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.wte(ids))))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.hidden(ids)
        if self.breaks:
            torch._dynamo.graph_break()
        return getattr(self, self.name)(x).log_softmax(-1)


def skipped(report: Report) -> dict[str, str]:
    return {row.module: row.reason for row in report.skipped}


def run(model: Any, *args: Tensor, **options: Any) -> Report:
    backend = UncompiledBackend(Config(recipe="tensorwise", **options))
    torch.compile(model, backend=backend)(*args).sum().backward()
    return merge(backend.reports, cache="off")


@pytest.mark.parametrize("name", ["output", "proj_out", "to_logits", "decoder", "lm_head"])
@pytest.mark.parametrize("tied, reason", [(False, WIDE), (True, TIED)])
def test_a_head_is_spared_whatever_its_name_and_the_reason_says_why(name: str, tied: bool, reason: str) -> None:
    report = explain(Model(name, tied=tied), (IDS,))
    assert skipped(report) == {name: reason}
    assert {row.module for row in report.rewritten} == {"up", "down"}
    assert not explain(Model(name, tied=tied), (IDS,), config=Config(include=("*", name))).skipped


@pytest.mark.parametrize("tied, reason", [(False, WIDE), (True, TIED)])
def test_a_graph_break_before_the_head_changes_nothing(tied: bool, reason: str) -> None:
    report = run(Model(tied=tied, breaks=True), IDS)
    assert skipped(report) == {"output": reason}
    assert {row.module for row in report.rewritten} == {"up", "down"}


def test_a_layer_in_the_middle_that_is_as_wide_as_the_vocabulary_is_not_a_head() -> None:
    report = explain(Model(middle=VOCABULARY), (IDS,))
    assert skipped(report) == {"output": WIDE}
    assert {row.module for row in report.rewritten} == {"up", "down"}


def test_a_weight_that_is_read_from_the_embedding_itself_is_a_head() -> None:
    def functional(self: ModuleOf, ids: Tensor) -> Tensor:
        return F.linear(self.up(self.wte(ids)), self.wte.weight)

    model = ModuleOf(functional, wte=nn.Embedding(VOCABULARY, D), up=nn.Linear(D, D))
    assert skipped(explain(model, (IDS,))) == {"wte": TIED}


class Positions(nn.Module):
    """Looks up ``rows`` positions and ends in an ordinary layer."""

    def __init__(self, rows: int, name: str, outputs: int) -> None:
        super().__init__()
        self.add_module(name, nn.Embedding(rows, D))
        self.name, self.up, self.last = name, nn.Linear(D, D), nn.Linear(D, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.up(x + getattr(self, self.name)(torch.arange(x.shape[1])))))


@pytest.mark.parametrize("rows, name, outputs", [
    (D, "table", D), (64, "pos_embed", 64), (64, "wpe", 64), (64, "position_embeddings", 64), (64, "table", 48),
])  # fmt: skip
def test_a_table_of_positions_makes_no_layer_a_head(rows: int, name: str, outputs: int) -> None:
    report = explain(Positions(rows, name, outputs), (torch.randn(2, 16, D),))
    assert not report.skipped, str(report)


def test_a_layer_that_every_block_has_is_not_a_head_also_where_a_graph_ends_behind_it() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(D, VOCABULARY), nn.Linear(VOCABULARY, D)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            torch._dynamo.graph_break()
            return self.down(y)

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.blocks = nn.Embedding(VOCABULARY, D), nn.ModuleList([Block(), Block()])

        def forward(self, ids: Tensor) -> Tensor:
            x = self.wte(ids)
            for block in self.blocks:
                x = block(x)
            return x

    assert not run(Blocks(), IDS).skipped


@pytest.mark.parametrize("name, tied, reason", [
    ("lm_head", False, WIDE), ("output", True, TIED), ("output", False, WIDE),
])  # fmt: skip
def test_a_head_that_is_compiled_by_itself_is_known_by_the_model_that_it_is_part_of(
    name: str, tied: bool, reason: str
) -> None:
    model = Model(name, tied=tied)
    report = run(model.get_submodule(name), model.hidden(IDS))
    assert not report.rewritten and {row.reason for row in report.skipped} == {reason}


def test_a_head_that_is_compiled_by_itself_in_a_model_without_an_embedding_is_known_by_its_name() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(D, 64)})
    report = run(model["lm_head"], torch.randn(4, D))
    assert {row.reason for row in report.rows} == {f"excluded: output head{INCLUDE}"}


@pytest.mark.parametrize("name, reason", [("output", WIDE), ("lm_head", WIDE)])
def test_a_head_that_was_compiled_in_its_place_is_known_when_the_model_calls_it(name: str, reason: str) -> None:
    def compiled_inside() -> tuple[nn.Module, UncompiledBackend]:
        model, backend = Model(name), UncompiledBackend(Config(recipe="tensorwise"))
        setattr(model, name, torch.compile(getattr(model, name), backend=backend))
        return model, backend

    model, backend = compiled_inside()
    model(IDS)
    assert {row.reason for one in backend.reports for row in one.rows} == {reason}


def test_a_head_by_name_that_was_compiled_in_its_place_needs_no_embedding() -> None:
    backend = UncompiledBackend(Config(recipe="tensorwise"))
    model = nn.ModuleDict({"lm_head": torch.compile(nn.Linear(D, 64), backend=backend)})
    model["lm_head"](torch.randn(4, D))
    assert {row.reason for row in backend.reports[0].rows} == {f"excluded: output head{INCLUDE}"}
