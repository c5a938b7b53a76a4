"""What is used of transformers beyond its documented interface."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, core_model_loading
from transformers.trainer import OPTIMIZER_NAME

from fp8_compile.torch_internals.transformers import conversions, optimizer_file


def mixtral() -> MixtralForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def test_stacks_are_split_and_names_changed_as_a_checkpoint_has_them() -> None:
    found = conversions(mixtral())
    assert found is not None
    stack = "model.layers.0.mlp.experts.down_proj"
    split = found.store({stack: torch.arange(2).view(2, 1, 1)})
    assert {name: int(one) for name, one in split.items()} == {
        f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight": expert for expert in range(2)
    }
    router = "model.layers.0.mlp.gate.weight"
    assert found.stored(router) == "model.layers.0.block_sparse_moe.gate.weight"
    assert found.own(found.stored(router)) == router
    joined = found.load({**split, found.stored(router): torch.ones(1), "of.no.model": torch.ones(1)}, [stack, router])
    assert joined.keys() == {stack, router, "of.no.model"}
    assert torch.equal(joined[stack], torch.arange(2).view(2, 1, 1))


def test_other_modules_are_not_converted() -> None:
    assert conversions(nn.Linear(2, 2)) is None


def test_a_release_without_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(core_model_loading, "revert_weight_conversion")
    found = conversions(mixtral())
    with pytest.raises(ImportError, match=r"has no core_model_loading\.revert_weight_conversion.*install a release"):
        found.store({})


def test_the_optimizers_file_is_the_trainers() -> None:
    assert optimizer_file() == OPTIMIZER_NAME
