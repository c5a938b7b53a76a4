"""A short run of the fuzzer of random graphs, and that it would find what it looks for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from graph_cases import Call, Case, CaseRun, Failure
from graphs import shrink
from simulated_fp8 import Unaccounted

from fp8_compile import Report

SEEDS = (1, 7)
PLAIN = dataclasses.replace(
    Case.draw(0), pieces=(), tokens=(16,), width=32, dtype=torch.float32, autocast=False, layout="contiguous",
    input_grad=True, magnitude=1.0, calls=1, poison=None, options={"recipe": "tensorwise", "target": "cpu"},
)  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_random_models_are_as_good_as_a_simulation_of_fp8(seed: int) -> None:
    seen = [CaseRun(Case.draw(seed * 1000 + number)).run() for number in range(4)]
    assert sum(one.rewritten for one in seen) and sum(one.tensors for one in seen)


@pytest.mark.parametrize("recipe, target", [
    ("tensorwise", "cpu"), ("delayed", "cuda:100"), ("rowwise", "hip:gfx942"), ("blockwise", "cuda:90"),
])  # fmt: skip
def test_a_layer_runs_in_fp8_under_every_recipe(recipe: str, target: str) -> None:
    options = {"recipe": recipe, "target": target}
    seen = CaseRun(dataclasses.replace(PLAIN, width=128, options=options, poison=float("nan"))).run()
    assert seen.rewritten > 0


class Wrong(CaseRun):
    """A run whose engine is wrong in one way."""

    def __init__(self, case: Case, how: str) -> None:
        super().__init__(case)
        self.how = how

    def _engine(self, call: Call) -> dict[str, torch.Tensor]:
        found = super()._engine(call)
        if self.how == "a factor":
            found["grad of layer1.weight"] *= 1.1
        elif self.how == "one row":
            found["output"][0] = found["output"][1]
        elif self.how == "a gradient that is missing":
            del found["grad of layer1.bias"]
        elif self.how == "an Inf that vanishes":
            found = {name: tensor.nan_to_num(0, 0, 0) for name, tensor in found.items()}
        elif self.how == "a dtype":
            found["output"] = found["output"].half()
        self.backend.reports[:] = [self._changed(report) for report in self.backend.reports]
        return found

    def _changed(self, report: Report) -> Report:
        first, *others = report.rows
        changes: dict[str, Any] = {
            "a row that is missing": others,
            "a row too many": [*report.rows, first],
            "another gemm": [dataclasses.replace(row, gemm="output") for row in report.rows],
            "other formats": [dataclasses.replace(row, formats=("e5m2", "e5m2")) for row in report.rows],
            "a layer that was forgotten": [
                dataclasses.replace(row, decision="skipped", reason="no idea") for row in report.rows
            ],
        }
        return dataclasses.replace(report, rows=tuple(changes.get(self.how, report.rows)))


@pytest.mark.parametrize("how, error", [
    ("a factor", "grad of layer1.weight"), ("one row", "output"), ("a gradient that is missing", "the engine gave"),
    ("an Inf that vanishes", "finite where FP64's is not"), ("a dtype", "output is torch.float16"),
    ("a row that is missing", "has no row"), ("a row too many", "does not have"),
    ("another gemm", "no row|does not have"),
    ("other formats", "instead of"), ("a layer that was forgotten", "skipped"),
])  # fmt: skip
def test_what_is_wrong_would_be_found(how: str, error: str) -> None:
    case = dataclasses.replace(PLAIN, poison=float("inf") if "Inf" in how else None)
    with pytest.raises((Failure, Unaccounted, AssertionError), match=error):
        Wrong(case, how).run()


def test_a_failing_case_is_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_with_two_pieces(case: Case) -> BaseException | None:
        return Failure() if {3, 5} <= set(case.pieces) else None

    monkeypatch.setattr("graphs.error_of", fails_with_two_pieces)
    case = dataclasses.replace(Case.draw(0), pieces=(1, 2, 3, 4, 5, 6))
    assert shrink(case).pieces == (3, 5)


def test_cases_are_the_same_each_time() -> None:
    assert Case.draw(5) == Case.draw(5) != Case.draw(6)
