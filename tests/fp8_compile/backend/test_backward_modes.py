"""``backward="high_precision"`` and ``"dequantized"`` in compiled code, with what training puts around it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8_compile

TOKENS, WIDTH, OUT = 48, 64, 96


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


class Scaled(nn.Module):
    """A layer with a bias, called twice, after something that autograd has to go through."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(torch.tanh(self.layer(x)))
        return y


def step(model: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(gradient)
    grads = {name.removeprefix("_orig_mod."): p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


@pytest.fixture(scope="module")
def data() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, OUT), torch.randn(TOKENS, WIDTH) * torch.randn(TOKENS, 1).exp(), torch.randn(TOKENS, OUT)


@pytest.mark.parametrize("options", [{}, {"loss_scale": 1024.0}, {"recipe": "mxfp8"}, {"recipe": "nvfp4"}], ids=str)
def test_dequantized_gradients_are_those_of_the_product_that_forward_computed(
    data: tuple[nn.Linear, Tensor, Tensor], options: dict[str, Any]
) -> None:
    """Forward is ``x' @ w'.T + b``. ``grad_weight`` has x' in it, and ``grad_input`` w': solved for, they give y."""
    layer, x, gradient = copy.deepcopy(data[0]), data[1], data[2]
    compiled = torch.compile(layer, backend="fp8", options={**options, "backward": "dequantized"})
    for _ in range(3):
        found = step(compiled, x, gradient)
    x_used = torch.linalg.lstsq(gradient.t().double(), found["weight"].double()).solution
    y = found["y"].double() - layer.bias.detach().double()
    w_used = torch.linalg.lstsq(gradient.double(), found["x"].double()).solution  # one of many: gradient @ it is right
    assert relative(gradient.double() @ w_used, found["x"]) < 1e-6
    assert 0.001 < relative(x_used, x) < 0.3  # rounded
    # <gradient, y> = <gradient w', x'>: the two gradients and the output belong to one product.
    assert (found["x"].double() * x_used).sum().item() == pytest.approx((gradient.double() * y).sum().item(), rel=1e-5)
    assert relative(found["bias"], gradient.sum(0)) < 1e-6


def test_high_precision_gradients_are_those_of_the_tensors(data: tuple[nn.Linear, Tensor, Tensor]) -> None:
    layer, x, gradient = copy.deepcopy(data[0]), data[1], data[2]
    compiled = torch.compile(layer, backend="fp8", options={"backward": "high_precision"})
    found = [step(compiled, x, gradient) for _ in range(2)][-1]
    assert relative(found["y"], layer(x)) > 0.001
    assert relative(found["x"], gradient @ layer.weight) < 1e-6 > relative(found["weight"], gradient.t() @ x)


def test_the_weight_cache_changes_no_number(data: tuple[nn.Linear, Tensor, Tensor]) -> None:
    models, results = [copy.deepcopy(data[0]) for _ in range(2)], []
    for model, cached in zip(models, (True, False)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="fp8", options={"backward": "dequantized"})
        fp8_compile.attach(compiled, optimizer, weight_cache=cached)
        for _ in range(3):
            found = step(compiled, *data[1:])
            optimizer.step()
        results.append(found)
        assert (fp8_compile.scaling_state(model).weights is not None) == cached
    for one, other in zip(*map(dict.values, results)):
        assert torch.equal(one, other)


def test_blocks_that_are_compiled_one_by_one_have_the_gradients_of_the_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Scaled())
    x, gradient = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    options = {"recipe": "tensorwise", "backward": "dequantized"}
    whole = step(torch.compile(copy.deepcopy(model), backend="fp8", options=options), x, gradient)
    for block in model:
        block.compile(backend="fp8", options=options)
    for name, found in step(model, x, gradient).items():
        assert relative(found, whole[name]) < 1e-5, name


@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
def test_the_state_has_no_slots_of_gradients(data: tuple[nn.Linear, Tensor, Tensor], backward: str) -> None:
    layer = copy.deepcopy(data[0])
    compiled = torch.compile(layer, backend="fp8", options={"backward": backward})
    for _ in range(2):
        step(compiled, *data[1:])
    names = {name.rsplit(".", 1)[0] for name in fp8_compile.scaling_state(layer).state_dict() if "#" in name}
    assert names == {"#0.input", "#0.weight"}


def test_what_is_not_finite_in_a_forward_operand_reaches_the_gradient(data: tuple[nn.Linear, Tensor, Tensor]) -> None:
    layer, x, gradient = copy.deepcopy(data[0]), data[1].clone(), data[2]
    compiled = torch.compile(layer, backend="fp8", options={"backward": "dequantized"})
    step(compiled, x, gradient)
    x[3, 5] = torch.inf
    found = step(compiled, x, gradient)
    assert not found["weight"][:, 5].isfinite().any() and found["x"].isfinite().all()
