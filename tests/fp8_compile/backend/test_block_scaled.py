"""Training with ``recipe="mxfp8"`` and ``recipe="nvfp4"``: what the compiled step computes, against the formulas."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fp8_compile
from fp8_compile.kernels.mxfp8 import dequantize_mx, quantize_mx
from fp8_compile.kernels.nvfp4_training import LARGEST, dequantize_nvfp4, global_scale, quantize_nvfp4

TOKENS, WIDTH, OUT = 48, 64, 96


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def _step(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(gradient)
    assert x.grad is not None and isinstance(layer.weight, Tensor) and layer.weight.grad is not None
    return y.detach(), x.grad, layer.weight.grad.clone()


@pytest.fixture(scope="module")
def data() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, OUT, bias=False)
    return layer, torch.randn(TOKENS, WIDTH) * torch.randn(TOKENS, 1).exp(), torch.randn(TOKENS, OUT)


def _mx(x: Tensor, block: tuple[int, int]) -> Tensor:
    return dequantize_mx(*quantize_mx(x, block), block).double()


def test_mxfp8_multiplies_what_its_formula_says(data: tuple[nn.Linear, Tensor, Tensor]) -> None:
    layer, x, gradient = data
    compiled = torch.compile(copy.deepcopy(layer), backend="fp8", options={"recipe": "mxfp8"})
    y, grad_input, grad_weight = _step(compiled, x, gradient)
    w = _mx(layer.weight.detach(), (32, 32))
    assert _relative(y, _mx(x, (1, 32)) @ w.t()) < 1e-6
    assert _relative(grad_input, _mx(gradient, (1, 32)) @ w) < 1e-6
    assert _relative(grad_weight, _mx(gradient, (32, 1)).t() @ _mx(x, (32, 1))) < 1e-6


def _nvfp4(x: Tensor, block: tuple[int, int]) -> Tensor:
    enc, dequant = global_scale(x)
    return (dequantize_nvfp4(*quantize_nvfp4(x, enc, block, False, False, None, 0, False)) * dequant).double()


NVFP4 = {"recipe": "nvfp4", "global_scale": "exact"}


def test_nvfp4_multiplies_what_its_formula_says(data: tuple[nn.Linear, Tensor, Tensor]) -> None:
    layer, x, gradient = data
    compiled = torch.compile(copy.deepcopy(layer), backend="fp8", options=NVFP4)
    y, grad_input, grad_weight = _step(compiled, x, gradient)
    w = _nvfp4(layer.weight.detach(), (16, 16))
    assert _relative(y, _nvfp4(x, (1, 16)) @ w.t()) < 1e-6
    # Gradients are rounded at random: the mean over many steps is what an unrounded gradient gives.
    runs = [_step(compiled, x, gradient)[1:] for _ in range(64)]
    means = [torch.stack(parts).mean(0) for parts in zip(*runs)]
    assert _relative(means[0], gradient.double() @ w) < 0.04  # 0.2 by one step, divided by 8
    assert _relative(grad_input, means[0]) > 0.08
    assert _relative(means[1], gradient.t() @ x) < 0.15  # x itself has an error of about 0.1
    assert _relative(grad_weight, means[1]) > 0.08


def test_random_rounding_follows_the_seed(data: tuple[nn.Linear, Tensor, Tensor]) -> None:
    layer, x, gradient = data
    compiled = torch.compile(copy.deepcopy(layer), backend="fp8", options=NVFP4)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(_step(compiled, x, gradient)[1])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_the_scale_of_a_tensor_comes_from_earlier_steps(data: tuple[nn.Linear, Tensor, Tensor]) -> None:
    layer, x, gradient = data
    model = copy.deepcopy(layer)
    compiled = torch.compile(model, backend="fp8", options={"recipe": "nvfp4"})
    for _ in range(3):
        y = _step(compiled, x, gradient)[0]
    w = layer.weight.detach()
    assert _relative(y, x @ w.t()) < 0.2
    saved = fp8_compile.scaling_state(model).state_dict()
    assert saved["#0.weight.scale"].item() == pytest.approx(LARGEST / w.abs().max().item(), rel=1e-5)
    for name, tensor in (("input", x), ("grad_output", gradient)):
        known = saved[f"#0.{name}.scale"].item()
        assert known == pytest.approx(LARGEST / (4 * tensor.abs().max().item()), rel=1e-5)  # with a margin of 2


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_reaches_the_result_and_never_the_state(
    data: tuple[nn.Linear, Tensor, Tensor], recipe: str, bad: float
) -> None:
    layer, x, gradient = data
    model = copy.deepcopy(layer)
    compiled = torch.compile(model, backend="fp8", options={"recipe": recipe})
    first = _step(compiled, x, gradient)
    spoilt = gradient.clone()
    spoilt[3, 5] = bad
    _, grad_input, grad_weight = _step(compiled, x, spoilt)
    assert not grad_input[3].isfinite().any() and grad_input[4:].isfinite().all()
    assert not grad_weight[5].isfinite().any()
    after = _step(compiled, x, gradient)
    for before, now in zip(first, after):
        assert now.isfinite().all() and _relative(now, before) < 0.4
