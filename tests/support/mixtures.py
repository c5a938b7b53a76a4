"""Small mixtures of experts of transformers, and an experts module by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "num_experts_per_tok": 2}


def mixtral(**options: Any) -> MixtralForCausalLM:
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, **HEADS, "num_local_experts": 4, **options})).eval()


def qwen(**options: Any) -> Qwen3MoeForCausalLM:
    sizes = {**SIZES, **HEADS, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **options})).eval()


def experts(implementation: str = "grouped_mm", count: int = 4, transposed: bool = False) -> nn.Module:
    """Mixtral's experts, [E, N, K]; or gpt-oss's, [E, K, N], gate and up interleaved, with biases."""
    kind, config = (GptOssExperts, GptOssConfig) if transposed else (MixtralExperts, MixtralConfig)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_local_experts": count}
    made = kind(config(**sizes, experts_implementation=implementation)).eval()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made.requires_grad_(False)


def routed(tokens: int, count: int = 4, top: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the experts that each goes to, and with which weight."""
    chosen = torch.rand(tokens, count).topk(min(top, count), dim=-1)
    return torch.randn(tokens, 32), chosen.indices, chosen.values.softmax(-1)
