"""Which layers are linear, and which of them servers fuse."""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear

from fp8_compile import PackedLinear, pack
from fp8_compile.packing.linear_layers import fused_groups, reason_against_packing


def test_layers_that_servers_fuse_are_grouped_within_their_parent_and_others_are_not() -> None:
    llama = [f"layers.{i}.attn.{name}_proj" for i in (0, 1) for name in "qkvo"]
    assert fused_groups(llama) == [tuple(llama[:3]), tuple(llama[4:7])]
    latent = ["attn.q_a_proj", "attn.q_b_proj", "attn.kv_a_proj_with_mqa", "attn.kv_b_proj"]
    assert fused_groups(latent) == [("attn.q_a_proj", "attn.kv_a_proj_with_mqa")]
    assert fused_groups(["a.gate_proj", "b.up_proj", "c.q_proj"]) == []


def test_falcons_linear_layer_is_one_and_others_with_a_forward_of_their_own_are_not() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    assert reason_against_packing(FalconLinear(16, 16)) is None
    assert reason_against_packing(Doubled(16, 16)) == "Doubled computes more than a linear layer"
    layer, x = FalconLinear(32, 24), torch.randn(3, 32)
    model = nn.Sequential(layer)
    expected = model(x)
    assert pack(model, "fp8", progress=False).packed[0].name == "0"
    assert isinstance(layer, PackedLinear) and (model(x) - expected).norm() < 0.05 * expected.norm()
