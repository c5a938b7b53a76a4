"""Packed layers are ordinary modules: state, moves, copies, gradients."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from fp8_compile import PackedLinear, pack, quantize_nvfp4
from fp8_compile.kernels.nvfp4 import ops
from fp8_compile.packed_linear import NVFP4Linear

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
    meta = copy.deepcopy(ours).to("meta")
    assert all(value.device.type == "meta" for value in meta.state_dict(keep_vars=True).values())
    assert {name: (v.shape, v.dtype) for name, v in meta._buffers.items()} == {
        name: (v.shape, v.dtype) for name, v in ours._buffers.items()
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


def test_weights_take_at_most_29_percent_of_bf16() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, dtype=torch.bfloat16) for _ in range(2)))
    before = sum(layer.weight.nbytes for layer in model)
    pack(model, progress=False)
    assert all(isinstance(layer, NVFP4Linear) for layer in model)
    assert sum(buffer.nbytes for layer in model for buffer in layer.buffers()) <= 0.29 * before
    assert sum(layer.memory_bytes() for layer in model) <= 0.29 * before
