"""What packing did to a language model."""

from __future__ import annotations

import copy

import pytest
import torch
from mixtures import mixtral

from fp8_compile import pack
from fp8_compile.packing.compare import compare, perplexity

IDS = torch.arange(24).view(2, 12)


def test_layers_and_experts_have_the_error_of_their_outputs_and_weights() -> None:
    model = mixtral()
    packed = copy.deepcopy(model)
    pack(packed, method="rtn", progress=False)
    compared = compare(model, packed, [IDS[:1], IDS[1:]])
    assert compared.tokens == 22
    name = "model.layers.0.self_attn.q_proj"
    seen = []
    hook = packed.get_submodule(name).register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        packed(IDS)
    hook.remove()
    exact = seen[0][0] @ model.get_submodule(name).weight.detach().t()
    assert compared.layers[name] == pytest.approx(float((seen[0][1] - exact).norm() / exact.norm()), rel=1e-3)
    stack = "model.layers.0.mlp.experts.down_proj"
    assert 0.05 < compared.layers[stack] < 0.15  # NVFP4 of normal weights: about 0.09
    assert compared.perplexity == pytest.approx(perplexity(packed, [IDS]), rel=1e-6)
    same = compare(model, model, [IDS])
    assert same.divergence == 0 and same.agreement == 1 and same.layers == {}


def test_another_model_is_not_compared() -> None:
    packed = mixtral()
    pack(packed, method="rtn", progress=False)
    with pytest.raises(ValueError, match=r"q_proj: the original model has no such layer of \[32, 32\]"):
        compare(mixtral(hidden_size=64), packed, [IDS])
