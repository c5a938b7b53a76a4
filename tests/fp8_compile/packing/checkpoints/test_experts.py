"""Experts in checkpoints: under the names that servers and transformers read, and back."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from mixtures import mixtral, qwen
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from fp8_compile import load_checkpoint, pack, pack_folder, save_checkpoint
from fp8_compile.packing.checkpoints.stored_names import StoredNames
from fp8_compile.packing.packed_experts import PackedExperts

IDS = torch.arange(12).view(2, 6)
MIXTRAL = ("model.layers.0.block_sparse_moe.experts", "w1", "w3", "w2")
QWEN = ("model.layers.0.mlp.experts", "gate_proj", "up_proj", "down_proj")


def packed(make, format: str = "nvfp4", **options: object) -> nn.Module:
    model = make()
    pack(model, format, method="rtn" if format == "nvfp4" else None, progress=False, **options)
    return model


@pytest.mark.parametrize("make, names", [(mixtral, MIXTRAL), (qwen, QWEN)])
@pytest.mark.parametrize(
    "format, layout, parts",
    [
        ("nvfp4", "compressed-tensors", ("weight_packed", "weight_scale", "weight_global_scale")),
        ("nvfp4", "modelopt", ("weight", "weight_scale", "weight_scale_2")),
        ("fp8", "compressed-tensors", ("weight", "weight_scale")),
    ],
)
def test_a_mixture_comes_back_from_a_checkpoint_of_a_matrix_an_expert(
    make, names, format, layout, parts, tmp_path: pathlib.Path
) -> None:
    model = packed(make, format)
    save_checkpoint(model, tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    parent, gate, up, down = names
    mine = {key for key in stored if ".experts." in key}
    assert mine == {f"{parent}.{e}.{one}.{part}" for e in range(4) for one in (gate, up, down) for part in parts}
    assert f"{parent.removesuffix('.experts')}.gate.weight" in stored, "the router goes by the same names"
    experts = model.model.layers[0].mlp.experts
    matrix = experts.gate_up_proj_packed.matrix(2)
    codes = matrix.codes if format == "nvfp4" else matrix[0]
    assert torch.equal(stored[f"{parent}.2.{up}.{parts[0]}"].view(torch.uint8), codes[48:].view(torch.uint8))
    if format == "nvfp4":
        assert torch.equal(*(stored[f"{parent}.2.{one}.{parts[-1]}"] for one in (gate, up))), "one global scale"
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"] == [
        "lm_head",
        f"{parent.removesuffix('.experts')}.gate",
    ]
    for other in (make(), packed(make, format)):
        load_checkpoint(other, tmp_path)
        assert isinstance(other.model.layers[0].mlp.experts, PackedExperts)
        torch.testing.assert_close(other(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-6)


def test_transformers_reads_our_fp8_experts(tmp_path: pathlib.Path) -> None:
    model = packed(mixtral, "fp8")
    save_checkpoint(model, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-6)


def test_a_folder_that_was_packed_matrix_by_matrix_is_loaded_into_stacks(tmp_path: pathlib.Path) -> None:
    model = mixtral()
    model.save_pretrained(tmp_path / "plain")
    pack_folder(tmp_path / "plain", tmp_path / "packed", method="rtn", progress=False)
    other, ours = load_checkpoint(mixtral(), tmp_path / "packed"), model
    pack(ours, method="rtn", progress=False)
    torch.testing.assert_close(other(IDS).logits, ours(IDS).logits, rtol=1e-4, atol=1e-6)
    assert isinstance(other.model.layers[0].mlp.experts, PackedExperts)


def test_experts_that_are_not_packed_are_stored_a_matrix_an_expert_too(tmp_path: pathlib.Path) -> None:
    model = packed(qwen, exclude=("*.experts",))
    save_checkpoint(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = f"{QWEN[0]}.3.up_proj"
    assert torch.equal(stored[f"{layer}.weight"], model.model.layers[0].mlp.experts.gate_up_proj[3, 48:])
    assert layer in json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    other = load_checkpoint(qwen(), tmp_path)
    torch.testing.assert_close(other(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-6)


def test_gate_and_up_of_two_global_scales_get_one(tmp_path: pathlib.Path) -> None:
    model = packed(qwen)
    save_checkpoint(model, tmp_path, "modelopt")
    stored = load_file(tmp_path / "model.safetensors")
    for expert in range(4):
        stored[f"{QWEN[0]}.{expert}.gate_proj.weight_scale_2"] *= 2  # gates of twice the size
    save_file(stored, tmp_path / "model.safetensors")
    other = load_checkpoint(qwen(), tmp_path).model.layers[0].mlp.experts
    ours = model.model.layers[0].mlp.experts.gate_up_proj_packed.dequantize()
    expected = torch.cat((2 * ours[:, :48], ours[:, 48:]), 1)
    assert (other.gate_up_proj_packed.dequantize() - expected).norm() < 0.05 * expected.norm()


def test_what_no_checkpoint_holds_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2}
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, num_experts_per_tok=1)).eval()
    pack(model, method="rtn", progress=False)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.gate_up_proj.*exclude"):
        save_checkpoint(model, tmp_path)
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj: layout='gguf' holds no experts"):
        save_checkpoint(packed(mixtral), tmp_path, "gguf")
    with pytest.raises(ValueError, match=r"experts\.gate_up_proj: layout='modelopt' holds experts in FP8 only"):
        save_checkpoint(packed(mixtral, "fp8"), tmp_path, "modelopt")
    assert not list(tmp_path.iterdir())
    save_checkpoint(packed(qwen), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    rest = {key: one for key, one in stored.items() if "experts.1.down_proj" not in key}
    save_file(rest, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"mlp\.experts\.down_proj: .* but not .*experts\.1\.down_proj"):
        load_checkpoint(qwen(), tmp_path)


def test_experts_of_a_model_that_transformers_does_not_know_have_plain_names() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = qwen().model.layers[0].mlp.experts

    parts = StoredNames(Block()).parts
    assert len(parts) == 12 and parts["experts.2.up_proj"].rows(96) == slice(48, 96)
    assert parts["experts.2.down_proj"].stack == "experts.down_proj"
