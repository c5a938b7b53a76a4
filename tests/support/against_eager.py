"""One training step of a compiled model against the same model in eager mode."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import nn
from uncompiled import UncompiledBackend

from fp8_compile import Config, Report

# One FP8 gemm of normal data has 28 dB forward and 24 dB backward; a wrong factor, row or operand has less than 7.
LEAST_DB = 20.0


class Result(NamedTuple):
    """What the backend reports, and how well its numbers agree."""

    report: Report
    snr: dict[str, float]  # of the output, the input's gradient and each parameter's gradient, in dB


def snr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Signal to noise ratio in dB."""
    noise = (actual.double() - expected.double()).square().sum().item()
    signal = expected.double().square().sum().item()
    return float("inf") if noise == 0 else 10 * torch.tensor(signal / noise).log10().item()


def train(model: nn.Module, x: torch.Tensor, config: Config | None = None) -> Result:
    """One forward and backward of the compiled model against the same model in eager mode."""
    reference, backend = copy.deepcopy(model), UncompiledBackend(config)
    results = []
    for one in (torch.compile(model, backend=backend, fullgraph=True), reference):
        leaf = x.detach().clone().requires_grad_(x.is_floating_point())
        y = one(leaf)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
        grads = {name.removeprefix("_orig_mod."): p.grad for name, p in one.named_parameters() if p.requires_grad}
        results.append({"output": y.detach(), **({"x": leaf.grad} if leaf.requires_grad else {}), **grads})
    (report,) = backend.reports
    actual, expected = results
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and actual[name].shape == tensor.shape, name
    return Result(report, {name: snr(actual[name], expected[name]) for name in expected})
