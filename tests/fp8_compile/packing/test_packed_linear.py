"""Packed layers are ordinary modules: state, moves, copies, gradients."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from fp8_compile import Calibration, PackedLinear, pack, quantize_nvfp4
from fp8_compile.kernels import fp8_inputs
from fp8_compile.kernels.nvfp4 import ops
from fp8_compile.packing.packed_linear import NVFP4Linear

FORMATS = pytest.mark.parametrize("format", ["nvfp4", "fp8"])


def packed(k: int = 40, n: int = 24, **options: object) -> tuple[nn.Linear, PackedLinear]:
    layer = nn.Linear(k, n)
    model = nn.Sequential(copy.deepcopy(layer))
    pack(model, progress=False, **options)
    return layer, model[0]


@FORMATS
def test_eager_is_dequantize_then_matmul_and_gradients_flow_to_the_input(format: str) -> None:
    layer, ours = packed(format=format)
    x = torch.randn(2, 3, 40, requires_grad=True)
    y = ours(x)
    torch.testing.assert_close(y, x @ ours.dequantize().t() + layer.bias)
    assert 0 < (ours.weight - layer.weight).norm() / layer.weight.norm() < (0.1 if format == "nvfp4" else 0.03)
    y.sum().backward()
    torch.testing.assert_close(x.grad, ours.weight.sum(0).expand(2, 3, 40))
    assert ours.bias.grad is not None and [name for name, _ in ours.named_parameters()] == ["bias"]
    assert isinstance(ours, PackedLinear) and ours.in_features == 40 and ours.out_features == 24


def test_state_dicts_are_in_the_standard_layout_and_load_back() -> None:
    layer, ours = packed(method="rtn")
    expected = quantize_nvfp4(layer.weight, "rtn")
    assert ours.layout == "interleaved" and not torch.equal(ours.codes, expected.codes)
    state = ours.state_dict()
    assert list(state) == ["bias", "codes", "block_scales", "global_scale"]
    assert torch.equal(state["codes"], expected.codes) and torch.equal(state["global_scale"], expected.global_scale)
    assert torch.equal(state["block_scales"].float(), expected.block_scales.float())
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    other = packed()[1]
    before = other.codes.clone()
    for assign in (False, True):
        other.load_state_dict(torch.load(buffer, weights_only=True), assign=assign)
        buffer.seek(0)
        assert other.layout == "interleaved" and torch.equal(other.codes, ours.codes)
        assert torch.equal(other.dequantize(), ours.dequantize()) and not torch.equal(other.codes, before)
    assert torch.equal(copy.deepcopy(ours).dequantize(), ours.dequantize())


@FORMATS
def test_casts_leave_the_packed_weight_alone_and_moves_take_it_along(format: str) -> None:
    layer, ours = packed(format=format)
    weight = ours.dequantize()
    ours.to(torch.bfloat16)
    assert ours.bias.dtype == ours.weight.dtype == torch.bfloat16 and torch.equal(ours.dequantize(), weight)
    assert ours(torch.randn(2, 40, dtype=torch.bfloat16)).dtype == torch.bfloat16
    ours.float()
    assert torch.equal(ours.dequantize(), weight) and ours.weight.dtype == torch.float32
    ours.bias = None
    assert ours.bfloat16().weight.dtype == torch.bfloat16, "T5 casts inputs to what a layer's weight says"
    ours.float()
    meta = copy.deepcopy(ours).to("meta")
    assert all(value.device.type == "meta" for value in meta.state_dict(keep_vars=True).values())
    assert {name: (v.shape, v.dtype) for name, v in meta.named_buffers()} == {
        name: (v.shape, v.dtype) for name, v in ours.named_buffers()
    }


def test_moving_to_another_device_lays_the_weight_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other device is here: another answer of the same question stands for it."""
    _, ours = packed()
    weight, interleaved = ours.dequantize(), ours.codes.clone()
    monkeypatch.setattr(ops, "layout_for", lambda device, block_size, activations: ops.STANDARD)
    ours._apply(lambda tensor: tensor.clone())
    assert ours.layout == "standard" and torch.equal(ours.dequantize(), weight)
    assert torch.equal(ours.codes, ours.nvfp4.codes) and not torch.equal(ours.codes, interleaved)
    monkeypatch.undo()
    ours.to(torch.float32)
    assert ours.layout == "interleaved" and torch.equal(ours.codes, interleaved)


def test_which_layout_is_whose() -> None:
    cpu = torch.device("cpu")
    assert ops.layout_for(cpu, 16, None) == ops.layout_for(cpu, 16, "int8") == "interleaved"
    assert ops.layout_for(cpu, 32, None) == ops.layout_for(cpu, 16, "nvfp4") == "standard"
    assert ops.layout_for(torch.device("meta"), 16, None) == "standard"
    wide = packed(block_size=32)[1]
    assert wide.layout == "standard" and wide.block_scales.shape == (24, 2)
    x = torch.randn(3, 40)
    torch.testing.assert_close(wide(x), x @ wide.dequantize().t() + wide.bias)


def test_int8_and_nvfp4_activations_are_rounded_by_blocks() -> None:
    x = torch.randn(5, 40)
    x[0, :16] *= 100
    for activations, tolerance in (("int8", 0.01), ("nvfp4", 0.2)):
        _, ours = packed(activations=activations)
        rounded = ops.round_activations(x, activations)
        torch.testing.assert_close(ours(x), rounded @ ours.dequantize().t() + ours.bias)
        blocks = [slice(0, 16), slice(16, 32), slice(32, 40)]
        assert all(0 < (rounded - x)[:, part].norm() < tolerance * x[:, part].norm() for part in blocks)
    assert ops.round_activations(torch.zeros(2, 16), "int8").eq(0).all()
    bad = torch.ones(2, 32)
    bad[0, 3] = torch.nan
    for activations in ("int8", "nvfp4"):
        assert ops.round_activations(bad, activations)[0, :16].isnan().all(), "an overflow does not vanish"


@pytest.mark.parametrize("static", [True, False])
def test_fp8_inputs_are_rounded_by_a_calibrations_scale_or_row_by_row(static: bool) -> None:
    x, layer = torch.randn(6, 40) * torch.logspace(-4, 1, 6)[:, None], nn.Linear(40, 24)
    model = nn.ModuleDict({"q": layer, "k": copy.deepcopy(layer), "up": nn.ModuleDict({"q": copy.deepcopy(layer)})})
    calibration = Calibration()
    for name in ("q", "k", "up.q"):
        calibration.record(name, x)
    report = pack(model, "fp8", activations="fp8", calibration=calibration if static else None, progress=False)
    ours, kind = model["q"], "static scale" if static else "dynamic scale a row"
    assert [row.reason for row in report.rows] == [f"inputs e4m3, {kind}"] * 3 and kind in repr(ours)
    rounded = fp8_inputs.round_inputs(x, ours.input_scale)
    torch.testing.assert_close(ours(x), rounded @ ours.dequantize().t() + ours.bias)
    error = (rounded - x).norm(dim=1) / x.norm(dim=1)
    assert 0 < error[-1] < 0.04 and (error[0] < 0.04) == (not static), "a row by itself is as exact as any other"
    if not static:
        assert ours.input_scale is None and "input_scale" not in ours.state_dict()
        return
    assert ours.input_scale == x.abs().amax() / 448
    # q and k share what their one input is quantized by, through casts and copies; layers elsewhere have their own.
    for one in (model, copy.deepcopy(model).to(torch.bfloat16)):
        assert one["q"].input_scale is one["k"].input_scale is not one["up"]["q"].input_scale
        assert one["q"].input_scale.dtype == torch.float32
    state = {**ours.state_dict(), "input_scale": torch.tensor(7.0)}
    ours.load_state_dict(state)
    assert ours.input_scale == 7 and model["k"].input_scale != 7


def test_a_layer_that_calibration_saw_only_zeros_in_is_scaled_row_by_row_and_tied_ones_by_their_own_inputs() -> None:
    model = nn.ModuleDict({name: nn.Linear(32, 16, bias=False) for name in ("one", "two", "zero")})
    model["two"].weight = model["one"].weight
    calibration = Calibration(hessians=False)
    for name, largest in (("one", 448.0), ("two", 896.0), ("zero", 0.0)):
        calibration.record(name, torch.full((2, 32), largest))
    report = pack(model, "fp8", activations="fp8", calibration=calibration, progress=False)
    assert [row.reason for row in report.rows] == [
        "inputs e4m3, static scale",
        "tied; inputs e4m3, static scale",
        "inputs e4m3, dynamic scale a row",
    ]
    assert model["one"].codes is model["two"].codes and model["one"].input_scale == 1 and model["two"].input_scale == 2
    assert model["zero"](torch.ones(1, 32)).abs().max() > 0


def test_weights_take_at_most_29_percent_of_bf16() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(2)))
    before = sum(layer.weight.nbytes for layer in model)
    pack(model, progress=False)
    assert all(isinstance(layer, NVFP4Linear) for layer in model)
    assert sum(buffer.nbytes for layer in model for buffer in layer.buffers()) <= 0.29 * before
    assert sum(layer.memory_bytes() for layer in model) <= 0.29 * before
