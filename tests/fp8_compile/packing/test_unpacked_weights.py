"""Which parameters are weights that a product reads, and which are not."""

from __future__ import annotations

import torch
from torch import nn

from fp8_compile.packing.unpacked_weights import unpacked_weights


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(4))


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 8))
        self.gate_up_proj_bias = nn.Parameter(torch.randn(3, 16))
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.position_embeddings = nn.Parameter(torch.randn(1, 9, 8))
        self.small = nn.Parameter(torch.randn(3, 16, 8).to(torch.float8_e4m3fn), requires_grad=False)


def test_products_have_a_reason_and_lookups_convolutions_norms_and_biases_have_none() -> None:
    model = nn.ModuleDict(
        {
            "router": Router(),
            "stacks": Stacks(),
            "attention": nn.MultiheadAttention(16, 2),
            "lstm": nn.LSTM(8, 8),
            "embedding": nn.Embedding(8, 8),
            "convolution": nn.Conv1d(4, 4, 3),
            "norm": nn.LayerNorm((4, 4)),
            "linear": nn.Linear(8, 8),
        }
    )
    known = {id(model["linear"].weight), id(model["attention"].out_proj.weight)}
    found = unpacked_weights(model, known)
    assert set(found) == {
        *("router.weight", "stacks.gate_up_proj", "stacks.small"),
        *("attention.in_proj_weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0"),
    }
    assert found["router.weight"] == ((4, 16), "Router multiplies by it in a forward of its own")
    assert "a stack of 3 matrices" in found["stacks.gate_up_proj"][1] and "Stacks" in found["stacks.gate_up_proj"][1]
    assert found["stacks.small"][1] == "dtype float8_e4m3fn"
