"""Inductor's estimate of peak memory, by which it keeps a dead buffer for a later one or does not, is the truth."""

import pytest
import torch
from torch import nn
from torch._inductor.codegen import wrapper
from torch._inductor.utils import fresh_cache


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 256, bias=False), nn.Linear(64, 256, bias=False)
        self.down = nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_the_estimate_is_what_a_step_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = []

    class Recorded(wrapper.EfficientPeakEstimate):
        def __init__(self) -> None:
            super().__init__()
            estimates.append(self.overall_peak_memory)

    monkeypatch.setattr(wrapper, "EfficientPeakEstimate", Recorded)
    model, x = SwiGLU().bfloat16(), torch.randn(512, 64, dtype=torch.bfloat16)
    with fresh_cache():
        compiled = torch.compile(model, backend="fp8")
        compiled(x).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compiled(x).sum().backward()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert max(estimates) == pytest.approx(most, rel=0.02)
