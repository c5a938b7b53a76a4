"""``pack(model, scales="training")``: the grid of the training's forward."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Config, PackedLinear, freeze_scales, load_checkpoint, pack, save_checkpoint, scaling_state
from fp8_compile.kernels.delayed_scaling import cast_delayed
from fp8_compile.kernels.mxfp8 import dequantize_mx, quantize_mx
from fp8_compile.kernels.nvfp4_training import dequantize_nvfp4, quantize_nvfp4
from fp8_compile.kernels.quantize import dequantize, quantize

WIDTH = 160  # two blocks of 128
RECIPES = ("delayed", "rowwise", "blockwise", "mxfp8", "nvfp4")
ACTIVATIONS = {"blockwise": "fp8", "delayed": "fp8", "rowwise": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
X = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
ROUNDING = 1e-6  # FP32 sums of 160 products in another order


class Model(nn.Module):
    """q and k share their input; the head has K = 8, too small for FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, 128), nn.Linear(WIDTH, 128, bias=False)
        self.out = nn.Linear(128, 8)
        self.small = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.q_proj(x) * self.k_proj(x))
        return self.small(self.out(y))


class Trained:
    """A model after three steps, what its forward computes in evaluation, and a packed copy."""

    def __init__(self, recipe: str) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.recipe, self.model = recipe, Model()
        self.run = torch.compile(self.model, backend=UncompiledBackend(Config(recipe=recipe)))
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        for _ in range(3):
            self.run(torch.randn(32, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if recipe in ("delayed", "nvfp4"):
            freeze_scales(self.model)
        with torch.no_grad():
            self.expected = self.run(X)
        self.packed = copy.deepcopy(self.model)
        self.report = pack(self.packed, scales=self.model, progress=False)


@pytest.fixture(scope="module", params=RECIPES)
def trained(request: pytest.FixtureRequest) -> Trained:
    return Trained(request.param)


def by_formula(trained: Trained, name: str) -> Tensor:
    """A weight as the recipe's formula rounds it."""
    w = trained.model.get_submodule(name).weight.detach()
    if trained.recipe == "mxfp8":
        return dequantize_mx(*quantize_mx(w, (32, 32)), (32, 32))
    if trained.recipe in ("delayed", "nvfp4"):
        scale = scaling_state(trained.model).state_dict()[f"{name}#0.weight.scale"]
        if trained.recipe == "delayed":
            return cast_delayed(w, scale, torch.float8_e4m3fn).float() * scale.reciprocal()
        enc = scale.reshape(1, 1)
        return dequantize_nvfp4(*quantize_nvfp4(w, enc, (16, 16), False, False, None, 0, False)) * enc.reciprocal()
    block = (1, -1) if trained.recipe == "rowwise" else (128, 128)
    return dequantize(*quantize(w, torch.float8_e4m3fn, block), block)


def test_weights_have_the_codes_and_scales_of_the_training_forward(trained: Trained) -> None:
    for name in ("q_proj", "k_proj"):
        assert torch.equal(trained.packed.get_submodule(name).dequantize(), by_formula(trained, name)), name


def test_the_packed_model_computes_what_the_forward_of_training_does(trained: Trained) -> None:
    found = trained.packed(X).detach()
    assert float((found - trained.expected).norm() / trained.expected.norm()) < ROUNDING
    rounding = float((trained.model(X).detach() - trained.expected).norm() / trained.expected.norm())
    assert rounding > 100 * ROUNDING  # there is something to meet: the model in high precision is far from it


def test_what_training_left_in_high_precision_is_left_alone(trained: Trained) -> None:
    assert {row.name for row in trained.report.packed} == {"q_proj", "k_proj"}
    reasons = {row.name: row.reason for row in trained.report.skipped}
    assert reasons["small"] == "training multiplies by it in high precision"
    assert type(trained.packed.small) is nn.Linear


def test_a_checkpoint_gives_the_same_model_back(trained: Trained, tmp_path: pathlib.Path) -> None:
    save_checkpoint(trained.packed, tmp_path)
    other = load_checkpoint(Model(), tmp_path, activations=ACTIVATIONS[trained.recipe])
    ours, theirs = trained.packed.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)
    assert torch.equal(other(X), trained.packed(X))


def test_gradients_of_inputs_are_those_of_the_packed_weights(trained: Trained) -> None:
    layer = trained.packed.q_proj
    assert isinstance(layer, PackedLinear)
    x, grad = X.clone().requires_grad_(), torch.randn(32, 128)
    layer(x).backward(grad)
    torch.testing.assert_close(x.grad, grad @ layer.dequantize(), rtol=1e-5, atol=1e-5)


def linear(**options: Any) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(WIDTH, 64))
    return model, torch.compile(model, backend=UncompiledBackend(Config(**options)))


def test_a_model_that_was_never_trained_says_what_to_do() -> None:
    model, run = linear(recipe="mxfp8")
    with torch.no_grad():
        run(X)
    with pytest.raises(ValueError, match="Sequential has no grid to take: no training forward of backend='fp8'"):
        pack(model, scales="training")
    with pytest.raises(ValueError, match="method: scales='training' takes weights and inputs as training has them"):
        pack(model, method="rtn", scales="training")
    with pytest.raises(ValueError, match="scales='train' is unknown; expected None, 'training', or the trained model"):
        pack(model, scales="train")
    run(X).sum().backward()
    with pytest.raises(ValueError, match="0: format='fp8', but it was trained with recipe='mxfp8'"):
        pack(model, "fp8", scales="training")
    assert type(model[0]) is nn.Linear
    pack(model, scales="training", progress=False)
    with pytest.raises(ValueError, match="its layers are packed already"):
        pack(model, scales="training")


def test_a_recipe_that_no_packed_format_holds_is_refused_by_name() -> None:
    for options, message in (
        ({"recipe": "tensorwise"}, "0: recipe='tensorwise' takes the scale of every input from the input as a whole"),
        ({"forward_format": "e5m2"}, "0: training quantizes it to e5m2"),
    ):
        model, run = linear(**options)
        run(X).sum().backward()
        with pytest.raises(ValueError, match=message):
            pack(model, scales="training")


def test_copies_of_an_attached_optimizer_are_what_is_packed() -> None:
    model, run = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train = fp8_compile.attach(run, optimizer)
    for _ in range(2):
        run(X).sum().backward()
        optimizer.step()
    run(X)
    (copied,) = scaling_state(model).weights.copies()
    codes, scales = copied.codes.clone(), copied.scales.clone()
    pack(model, scales="training", progress=False)
    assert torch.equal(model[0].codes.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(model[0].scales, scales[1].expand(64))
    assert train.steps == 2


def test_a_weight_that_is_replaced_takes_its_own_scale() -> None:
    model, run = linear()
    for _ in range(2):
        run(X).sum().backward()
    freeze_scales(model)
    with torch.no_grad():
        model[0].weight.mul_(8.0)
        frozen = run(X)
    report = pack(model, scales="training", progress=False)
    assert "outgrown its history" in report.packed[0].reason
    assert float((model(X).detach() - frozen).norm() / frozen.norm()) < ROUNDING
