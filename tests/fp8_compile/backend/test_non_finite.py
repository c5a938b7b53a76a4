"""Inf and NaN reach what depends on them, and nothing else where scales are by rows or blocks: against FP64."""

from __future__ import annotations

import fp8_reference as reference
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import nn
from uncompiled import compile_uncompiled

RECIPES = ["tensorwise", "rowwise", "blockwise"]
Results = dict[str, np.ndarray]
BAD = st.sampled_from([float("inf"), float("-inf"), float("nan")])
TOKENS, WIDTH, OUT = 9, 40, 24


class Poisoned:
    """One compiled layer to which bad values are given again and again."""

    def __init__(self, recipe: str) -> None:
        torch._dynamo.reset()
        self.model = nn.Linear(WIDTH, OUT)
        self.compiled, self.backend = compile_uncompiled(self.model, recipe)
        self.clean = {"input": torch.randn(TOKENS, WIDTH), "weight": self.model.weight.detach().clone()}
        self.clean["grad_output"] = torch.randn(TOKENS, OUT)

    def results(self, role: str, row: int, col: int, bad: float) -> tuple[Results, Results]:
        """Ours and FP64's with one element of one tensor replaced."""
        tensors = {name: tensor.clone() for name, tensor in self.clean.items()}
        tensors[role][row % tensors[role].shape[0], col % tensors[role].shape[1]] = bad
        with torch.no_grad():
            self.model.weight.copy_(tensors["weight"])
        arguments = tensors["input"], tensors["grad_output"]
        return reference.results(self.compiled, *arguments), reference.exact_results(self.model, *arguments)


@pytest.fixture(scope="module")
def poisoned() -> dict[str, Poisoned]:
    torch.manual_seed(0)
    return {recipe: Poisoned(recipe) for recipe in RECIPES}


DEPENDENT = {
    "input": {"output", "grad of weight"},
    "weight": {"output", "grad_input"},
    "grad_output": {"grad_input", "grad of weight", "grad of bias"},
}
placements = hypothesis.given(
    role=st.sampled_from(sorted(DEPENDENT)), row=st.integers(0, 63), col=st.integers(0, 63), bad=BAD
)


@placements
@hypothesis.settings(max_examples=25)
def test_inf_or_nan_under_rowwise_spoils_what_it_spoils_in_fp64_and_nothing_else(poisoned, role, row, col, bad) -> None:
    found, exact = poisoned["rowwise"].results(role, row, col, bad)
    for name in exact:
        np.testing.assert_array_equal(np.isfinite(found[name]), np.isfinite(exact[name]), err_msg=name)
    assert {name for name in exact if not np.isfinite(exact[name]).all()} == DEPENDENT[role]


@placements
@hypothesis.settings(max_examples=25)
def test_inf_or_nan_under_tensorwise_spoils_all_of_the_dependent_results(poisoned, role, row, col, bad) -> None:
    found, _ = poisoned["tensorwise"].results(role, row, col, bad)
    for name in found.keys() - {"grad of bias"}:  # a sum over rows, not a gemm
        finite = np.isfinite(found[name])
        assert not finite.any() if name in DEPENDENT[role] else finite.all(), name


@placements
@hypothesis.settings(max_examples=25)
def test_inf_or_nan_under_blockwise_spoils_at_least_what_it_spoils_in_fp64(poisoned, role, row, col, bad) -> None:
    found, exact = poisoned["blockwise"].results(role, row, col, bad)
    for name in exact:
        assert not np.isfinite(found[name])[~np.isfinite(exact[name])].any(), name
        assert name in DEPENDENT[role] or np.isfinite(found[name]).all(), name
    if role == "input":  # 1x128 blocks: the other tokens are not concerned
        assert np.isfinite(found["output"]).any(axis=1).sum() == TOKENS - 1


@pytest.mark.parametrize("recipe, target", [*((recipe, "cpu") for recipe in RECIPES), ("rowwise", "cuda:90")])
def test_an_overflow_inside_a_model_reaches_the_gradients_that_a_loss_scaler_looks_at(recipe: str, target: str) -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    compiled, _ = compile_uncompiled(model, recipe, target=target)
    dy = torch.randn(7, 32)
    dy[3, 5] = torch.inf
    found = reference.results(compiled, torch.randn(7, 32), dy)
    assert np.isfinite(found["output"]).all()
    weights = [name for name in found if name.endswith("weight")]
    assert len(weights) == 3 and all(not np.isfinite(found[name]).all() for name in weights)
    if recipe == "rowwise":  # the other tokens' gradients are whole
        assert np.isfinite(found["grad_input"]).all(axis=1).tolist() == [token != 3 for token in range(7)]
