"""Layers and experts in FP8 by blocks."""

from __future__ import annotations

import copy

import pytest
import torch
from mixtures import qwen
from torch import nn

import fp8_compile
from fp8_compile import pack
from fp8_compile.kernels import fp8_blocks
from fp8_compile.packing.packed_block_scaled import FP8BlockLinear, FP8BlockStack

IDS = torch.arange(12).view(2, 6)


def test_a_layer_multiplies_by_its_dequantized_weight_also_when_compiled() -> None:
    layer = nn.Linear(200, 150)
    wanted = fp8_blocks.quantize(layer.weight).dequantize()
    model = nn.Sequential(layer)
    report = pack(model, "fp8_blocks", progress=False)
    assert isinstance(layer, FP8BlockLinear) and report.rows[0].format == "fp8_blocks"
    x = torch.randn(3, 200)
    assert torch.equal(layer(x), nn.functional.linear(x, wanted, layer.bias))
    with torch.no_grad():
        compiled = torch.compile(model, backend="inductor")(x)
    torch.testing.assert_close(compiled, layer(x), rtol=1e-5, atol=1e-5)  # FP32 sums in another order
    other = copy.deepcopy(model).to(torch.bfloat16)
    assert other[0].codes.dtype == torch.float8_e4m3fn and other(x.bfloat16()).dtype == torch.bfloat16
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[0].dequantize(), layer.dequantize())


def test_experts_are_packed_by_blocks_and_looked_up() -> None:
    model = qwen()
    experts = model.model.layers[0].mlp.experts
    wanted = fp8_blocks.quantize(experts.gate_up_proj[2]).dequantize()
    pack(model, "fp8_blocks", progress=False)
    assert isinstance(experts.gate_up_proj_packed, FP8BlockStack)
    assert torch.equal(experts.gate_up_proj[2], wanted)
    assert torch.equal(experts.gate_up_proj[torch.tensor([2, 0])][0], wanted)
    assert bool(model(IDS).logits.isfinite().all())


def test_a_package_can_not_hold_it(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    pack(model, "fp8_blocks", progress=False)
    with pytest.raises(ValueError, match="FP8 by blocks has no CPU kernel to export"):
        fp8_compile.export(model, (torch.randn(2, 64),), tmp_path / "model.pt2")
    with pytest.raises(ValueError, match="fp8_blocks' has one method"):
        pack(nn.Sequential(nn.Linear(64, 64)), "fp8_blocks", method="gptq", progress=False)
