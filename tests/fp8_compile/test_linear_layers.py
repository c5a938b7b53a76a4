"""Which layers servers fuse."""

from __future__ import annotations

from fp8_compile.linear_layers import fused_groups


def test_layers_that_servers_fuse_are_grouped_within_their_parent_and_others_are_not() -> None:
    llama = [f"layers.{i}.attn.{name}_proj" for i in (0, 1) for name in "qkvo"]
    assert fused_groups(llama) == [tuple(llama[:3]), tuple(llama[4:7])]
    latent = ["attn.q_a_proj", "attn.q_b_proj", "attn.kv_a_proj_with_mqa", "attn.kv_b_proj"]
    assert fused_groups(latent) == [("attn.q_a_proj", "attn.kv_a_proj_with_mqa")]
    assert fused_groups(["a.gate_proj", "b.up_proj", "c.q_proj"]) == []
