"""Scales that begin with what a calibration saw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

from fp8_compile import Config, calibrate, scaling_state

D = 32


class Calibrated:
    """What ``fp8_compile.calibrate`` gives, as far as scales need it."""

    def __init__(self, **amaxes: float) -> None:
        self.amaxes = {name.strip("_"): amax for name, amax in amaxes.items()}

    def amax(self, name: str) -> float:
        return self.amaxes[name]


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_calibration_primes_the_scales_of_inputs(early: bool) -> None:
    model = nn.Sequential(nn.Linear(D, 48), nn.Tanh(), nn.Linear(48, D))
    compiled = torch.compile(model, backend=UncompiledBackend(Config()))
    x = 1e-3 * torch.randn(8, D)
    if early:
        scaling_state(model).prime(Calibrated(_0=7.0))  # of the first layer alone
        compiled(x).sum().backward()
        state = scaling_state(model).state_dict()
        assert state["0#0.input.amax_history"][:2].tolist() == [7.0, x.abs().max().item()]
        assert state["0#0.input.scale"] == torch.tensor(4 * 7.0).reciprocal() * 448
    else:
        compiled(x).sum().backward()
        scaling_state(model).prime(Calibrated(_0=7.0, _2=5.0))
        state = scaling_state(model).state_dict()
        assert (state["0#0.input.amax_history"].max(), state["2#0.input.amax_history"].max()) == (7, 5)
        with pytest.raises(ValueError, match=r"knows none of the model's quantized inputs \(0, 2\)"):
            scaling_state(model).prime(Calibrated(other=1.0))
    assert state["0#0.weight.amax_history"].max() == model[0].weight.abs().max(), "weights need no calibration"


def test_priming_a_model_that_has_trained_saturates_nothing_and_leaves_the_other_scales_alone() -> None:
    model = nn.Sequential(nn.Linear(D, 48), nn.Tanh(), nn.Linear(48, D))
    compiled = torch.compile(model, backend=UncompiledBackend(Config()))
    for _ in range(2):
        compiled(1e-3 * torch.randn(8, D)).sum().backward()
    before = scaling_state(model).state_dict()
    scaling_state(model).prime(Calibrated(_0=7.0))
    after = scaling_state(model).state_dict()
    assert after["0#0.input.counts"].tolist() == [3, 3, *[0] * 5]
    assert after["0#0.input.scale"] == torch.tensor(4 * 7.0).reciprocal() * 448
    assert {key for key in before if not torch.equal(before[key], after[key])} == {
        f"0#0.input.{field}" for field in ("scale", "amax_history", "counts")
    }


def test_a_product_outside_the_layers_that_were_calibrated_begins_without() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.matrix = nn.Linear(D, D), nn.Parameter(torch.randn(D, D))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + (2 * x) @ self.matrix

    model, x = Functional(), torch.randn(8, D)
    scaling_state(model).prime(calibrate(model, [7 * x], hessians=False, progress=False))
    torch.compile(model, backend=UncompiledBackend(Config()))(x).sum().backward()
    state = scaling_state(model).state_dict()
    assert state["layer#0.input.amax_history"][0] == 7 * x.abs().max()
    assert state["matrix#0.input.amax_history"][0] == 2 * x.abs().max()
