"""Models as Hugging Face writes them: small, with random weights; they train, and every gemm is in the report."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import fp8_reference as reference
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from uncompiled import UncompiledBackend

from fp8_compile import Config, Report, explain

VOCABULARY, D = 64, 32
THREE = ("output", "grad_input", "grad_weight")
IDS = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def llama(layers: int) -> LlamaForCausalLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": D, "intermediate_size": 64, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(**sizes, **ATTENTION))


def gpt2() -> GPT2LMHeadModel:
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_embd": D, "n_layer": 1, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, **TOKENS))


def bert() -> BertModel:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": D, "num_hidden_layers": 1, "intermediate_size": 64}
    return BertModel(BertConfig(**sizes, num_attention_heads=2, **no_dropout))


def clip() -> CLIPModel:
    sizes = {"hidden_size": D, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": 0, **TOKENS}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=D))


def mixtral(experts: str) -> MixtralForCausalLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": D, "intermediate_size": 64, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, **ATTENTION, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = experts
    return MixtralForCausalLM(config)


def train(model: nn.Module, loss_of: Callable[[Any], torch.Tensor], steps: int = 3, lr: float = 5e-3) -> list[Report]:
    """Train on one batch; the loss must fall at every step."""
    backend = UncompiledBackend()
    compiled, optimizer = torch.compile(model, backend=backend), torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        loss = loss_of(compiled)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert all(later < earlier for earlier, later in zip(losses, losses[1:])), losses
    return backend.reports


def counts(reports: list[Report]) -> Counter[tuple[str, str, str]]:
    return Counter((row.module, row.gemm, row.decision) for report in reports for row in report.rows)


def three(*modules: str, decision: str = "rewritten") -> dict[tuple[str, str, str], int]:
    return {(module, gemm, decision): 1 for module in modules for gemm in THREE}


def attention(*modules: str) -> dict[tuple[str, str, str], int]:
    """The fused attention kernel: one op forward, one backward."""
    return {(module, gemm, "skipped"): 1 for module in modules for gemm in ("output", "grad_input")}


def next_token_loss(model: Any) -> torch.Tensor:
    return model(IDS, labels=IDS, use_cache=False).loss


def test_llama_trains_with_all_seven_projections_of_a_layer_rewritten_three_times() -> None:
    reports = train(llama(layers=2), next_token_loss)
    layers = ["model.layers.0", "model.layers.1"]
    attn, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    projections = [f"{layer}.self_attn.{name}" for layer in layers for name in attn]
    projections += [f"{layer}.mlp.{name}" for layer in layers for name in mlp]
    assert counts(reports) == {
        **three(*projections),
        **attention(*(f"{layer}.self_attn" for layer in layers)),
        **three("lm_head", decision="skipped"),
    }


def test_gpt2_trains_with_its_conv1d_layers_rewritten() -> None:
    reports = train(gpt2(), next_token_loss)
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert counts(reports) == {
        **three(*(f"transformer.h.0.{name}" for name in names)),
        **attention("transformer.h.0.attn"),
        **three("lm_head", decision="skipped"),
    }


def test_bert_trains_with_every_dense_layer_rewritten() -> None:
    target = torch.randn(2, D).tanh()
    reports = train(bert(), lambda model: (model(IDS).pooler_output - target).square().mean(), lr=2e-3)
    names = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
    names += ("intermediate.dense", "output.dense")
    assert counts(reports) == {
        **three("pooler.dense", *(f"encoder.layer.0.{name}" for name in names)),
        **attention("encoder.layer.0.attention.self"),
    }


def mixtral_expects(rows: Counter[tuple[str, str, str]]) -> None:
    layer = "model.layers.0"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert three(f"{layer}.self_attn.{name}").items() <= rows.items(), name
    assert three(f"{layer}.mlp.gate", decision="skipped").items() <= rows.items(), "the router is 4 wide: too small"
    assert three("lm_head", decision="skipped").items() <= rows.items()
    assert all(module for module, _, _ in rows), "a row without a name"


def test_mixtral_with_gathered_experts_trains_and_its_experts_are_in_the_report() -> None:
    reports = train(mixtral("batched_mm"), next_token_loss)
    rows = counts(reports)
    mixtral_expects(rows)
    experts = {gemm: n for (module, gemm, _), n in rows.items() if module == "model.layers.0.mlp.experts"}
    # grad_weight is an outer product a token here, which Inductor writes without a matmul.
    assert (experts["output"], experts.get("grad_input")) == (2, 2), experts
    reasons = {row.reason for report in reports for row in report.rows if row.module == "model.layers.0.mlp.experts"}
    assert not any("activation by activation" in reason for reason in reasons), "a parameter taken for an activation"


def test_mixtral_with_grouped_experts_trains_in_bf16_and_its_experts_are_in_the_report() -> None:
    backend, model = UncompiledBackend(), mixtral("grouped_mm").bfloat16()
    next_token_loss(torch.compile(model, backend=backend)).backward()
    rows = counts(backend.reports)
    mixtral_expects(rows)
    experts = {gemm: n for (module, gemm, _), n in rows.items() if module == "model.layers.0.mlp.experts"}
    assert experts == {"output": 2, "grad_input": 2, "grad_weight": 2}, "gate_up_proj and down_proj, three gemms each"
    assert all(decision == "rewritten" for module, _, decision in rows if module == "model.layers.0.mlp.experts")
    assert model.model.layers[0].mlp.experts.down_proj.grad.isfinite().all()


def test_mixtral_in_fp32_runs_its_grouped_experts_in_fp8() -> None:
    """Transformers hides them in a custom op of its own: that is a matmul too."""
    with torch.no_grad():
        report = explain(mixtral("grouped_mm").eval(), (IDS,), {"use_cache": False})
    experts = [row for row in report.rows if row.module == "model.layers.0.mlp.experts"]
    assert len(experts) == 2 and all(row.rewritten for row in experts), str(report)


def test_a_router_is_excluded_by_a_glob_and_an_output_head_included_by_name() -> None:
    config = Config(exclude=("*.mlp.*",), include=("*", "lm_head"))
    report = explain(llama(layers=1), (IDS,), {"use_cache": False}, config)
    assert {row.reason for row in report.skipped if ".mlp." in row.module} == {"excluded by '*.mlp.*'"}
    assert not any(".mlp." in row.module for row in report.rewritten)
    assert {row.gemm for row in report.rewritten if row.module == "lm_head"} == set(THREE)


def gradients(model: Any, loss_of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Of all layers in one vector, but for those of key biases: softmax does not see a shift, they are zero but for
    noise."""
    model.zero_grad()
    loss_of(model).backward()
    layers = [one for name, one in model.named_parameters() if "k_proj.bias" not in name and one.ndim]
    return torch.cat([parameter.grad.double().flatten() for parameter in layers])


def test_noise_in_the_gradients_of_clip_is_the_recipes_own() -> None:
    """Its loss sees how the images of a batch differ, by 15 % of their embeddings here: noise of 4 % is a lot. An
    independent simulation finds gradients as far from FP32's, and the same ones."""
    torch.manual_seed(0)
    model = clip()
    ids, images = torch.randint(3, VOCABULARY, (4, 16)), torch.randn(4, 3, 32, 32)

    def contrastive(model: Any) -> torch.Tensor:
        return model(input_ids=ids, pixel_values=images, return_loss=True).loss

    def embeddings(model: Any) -> torch.Tensor:
        out, generator = model(input_ids=ids, pixel_values=images), torch.Generator().manual_seed(1)
        both = torch.cat([out.image_embeds, out.text_embeds])
        return (both * torch.randn(both.shape, generator=generator)).sum()

    compiled = torch.compile(copy.deepcopy(model), backend=UncompiledBackend(Config(recipe="blockwise")))
    simulated = reference.reference_model(model, reference.LinearLayer(reference.recipe("blockwise")))
    cosine = torch.nn.functional.cosine_similarity
    for loss_of, least, most in ((contrastive, 0.9, 0.98), (embeddings, 0.99, 1.0)):
        ours, theirs, exact = (gradients(one, loss_of) for one in (compiled, simulated, model))
        assert cosine(ours, theirs, dim=0) > 0.99
        assert least < cosine(theirs, exact, dim=0) < most
