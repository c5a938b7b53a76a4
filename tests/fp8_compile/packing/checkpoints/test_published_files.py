"""Checkpoints as others publish them: scales of a cache, FP8 by blocks, MXFP4 experts, several formats."""

from __future__ import annotations

import json
import logging
import pathlib
from typing import Any

import pytest
import torch
from mixtures import qwen
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fp8_compile import load_checkpoint, pack, quantize_nvfp4, save_checkpoint
from fp8_compile.kernels import fp8_blocks
from fp8_compile.packing.packed_block_scaled import FP8BlockLinear, FP8BlockStack
from fp8_compile.packing.packed_experts import NVFP4Stack
from fp8_compile.packing.packed_linear import FP8Linear, NVFP4Linear

IDS = torch.arange(12).view(2, 6)
ATTENTION = "model.layers.0.self_attn"


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 160, "intermediate_size": 288, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=5, num_key_value_heads=5)).eval()


def gpt_oss(**options: Any) -> GptOssForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    return GptOssForCausalLM(GptOssConfig(**{**sizes, **heads, **options})).eval()


def write(folder: pathlib.Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_scales_of_a_cache_are_passed_over_with_one_line(tmp_path: pathlib.Path, caplog) -> None:
    model = llama()
    pack(model, method="rtn", progress=False)
    save_checkpoint(model, tmp_path, "modelopt")
    tensors = load_file(tmp_path / "model.safetensors")
    scales = {f"{ATTENTION}.k_proj.k_scale": torch.ones(()), f"{ATTENTION}.v_proj.v_scale": torch.ones(())}
    write(tmp_path, tensors | scales)
    with caplog.at_level(logging.INFO, "fp8_compile"):
        other = load_checkpoint(llama(), tmp_path)
    assert [one.message for one in caplog.records if "cache" in one.message] == [
        f"{ATTENTION}.k_proj.k_scale and 1 other scales of an FP8 key-value cache are not used; "
        "kv_cache='fp8_static' uses them"
    ]
    assert torch.equal(other(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
def test_fp8_by_blocks_is_loaded_bit_for_bit(name: str, tmp_path: pathlib.Path) -> None:
    """As Qwen3-FP8 and DeepSeek have it, with bf16 or FP32 scales, and as llm-compressor's FP8_BLOCK."""
    model, tensors = llama(), {}
    for key, tensor in model.state_dict().items():
        if key.endswith("_proj.weight"):
            codes, scales = fp8_blocks.quantize(tensor)
            tensors |= {key: codes, key.replace("weight", name): scales}
            with torch.no_grad():
                tensor.copy_(codes.float() * scales.kron(torch.ones(128, 128))[: tensor.shape[0], : tensor.shape[1]])
        else:
            tensors[key] = tensor
    write(tmp_path, tensors)
    other = load_checkpoint(llama(), tmp_path)
    assert isinstance(other.get_submodule(f"{ATTENTION}.q_proj"), FP8BlockLinear)
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    tensors[f"{ATTENTION}.q_proj.{name}"] = torch.ones(3, 2)
    write(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"q_proj: expected FP8 .*got .*\(160, 160\) and .*\(3, 2\)"):
        load_checkpoint(llama(), tmp_path)


def test_compressed_tensors_reads_our_blocks(tmp_path: pathlib.Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = llama()
    pack(model, "fp8_blocks", progress=False)
    save_checkpoint(model, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    layer = f"{ATTENTION}.q_proj"
    stored = load_file(tmp_path / "model.safetensors")
    local = {name.removeprefix(f"{layer}."): one for name, one in stored.items() if name.startswith(f"{layer}.")}
    compressor = BaseCompressor.load_from_registry(said["format"])
    theirs = compressor.decompress(local, config.config_groups["group_0"])["weight"]
    torch.testing.assert_close(theirs.float(), model.get_submodule(layer).dequantize(), rtol=1e-2, atol=1e-6)
    other = load_checkpoint(llama(), tmp_path)
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match="by blocks of 128 x 128 are stored by layout='compressed-tensors'"):
        save_checkpoint(model, tmp_path / "other", "modelopt")


def test_experts_by_blocks_are_loaded(tmp_path: pathlib.Path) -> None:
    """gate and up are files of their own, in whole blocks as every published model has them."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 128}
    model = qwen(**sizes)
    pack(model, "fp8_blocks", progress=False)
    save_checkpoint(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.0.mlp.experts.1.up_proj.weight_scale"].shape == (1, 1)
    write(tmp_path, {name.replace("weight_scale", "weight_scale_inv"): one for name, one in tensors.items()})
    other = load_checkpoint(qwen(**sizes), tmp_path)
    assert isinstance(other.model.layers[0].mlp.experts.gate_up_proj_packed, FP8BlockStack)
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    odd = qwen()
    pack(odd, "fp8_blocks", progress=False)
    with pytest.raises(ValueError, match="gate and up of an expert can't be stored apart"):
        save_checkpoint(odd, tmp_path / "odd")


def mxfp4(model: GptOssForCausalLM, span: int) -> dict[str, Tensor]:
    """The model's tensors with experts in MXFP4, whose scales span as many powers of two; the model gets the values."""
    tensors = dict(model.state_dict())
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        e, k, n = tensors[key].shape
        blocks = torch.randint(0, 256, (e, n, k // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122 - span, 122, (e, n, k // 32), dtype=torch.uint8)
        scales[0, 0, 0], blocks[0, 0, 0] = 0, 0x80  # a block of zeros says nothing of the range
        with torch.no_grad():
            tensors[key].copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        del tensors[key]
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
    return tensors


def test_mxfp4_experts_become_nvfp4_without_loss(tmp_path: pathlib.Path) -> None:
    model = gpt_oss()
    write(tmp_path, mxfp4(model, 18))
    other = load_checkpoint(gpt_oss(), tmp_path)
    experts = other.model.layers[0].mlp.experts
    assert isinstance(experts.down_proj_packed, NVFP4Stack)
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(getattr(experts, name) + 0, getattr(model.model.layers[0].mlp.experts, name))
    torch.testing.assert_close(other(IDS).logits, model(IDS).logits)
    load_checkpoint(other, tmp_path)  # into experts that are packed already


def test_mxfp4_with_a_wider_range_rounds_its_smallest_blocks_and_says_so(tmp_path: pathlib.Path, caplog) -> None:
    model = gpt_oss()
    write(tmp_path, mxfp4(model, 30))
    with caplog.at_level(logging.INFO, "fp8_compile"):
        other = load_checkpoint(gpt_oss(), tmp_path)
    assert "blocks rounded to a larger scale" in caplog.text
    wanted, got = (one.model.layers[0].mlp.experts.down_proj.detach() + 0 for one in (model, other))
    assert float((wanted - got).abs().max()) <= 2.0**-18 * float(wanted.abs().max())


def test_mxfp4_that_does_not_fit_is_refused_and_nothing_changes(tmp_path: pathlib.Path) -> None:
    model = gpt_oss()
    tensors = mxfp4(model, 8)
    key = "model.layers.0.mlp.experts.down_proj"
    for wrong, message in (
        ({f"{key}_scales": None}, "down_proj_scales: expected uint8 .*got nothing"),
        ({f"{key}_scales": tensors[f"{key}_scales"][:2]}, r"down_proj_scales: expected uint8 \(3, 64, 3\)"),
        ({f"{key}_scales": torch.full_like(tensors[f"{key}_scales"], 255)}, "scales that are NaN"),
    ):
        write(tmp_path, {name: one for name, one in (tensors | wrong).items() if one is not None})
        other = gpt_oss()
        before = {name: one.clone() for name, one in other.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            load_checkpoint(other, tmp_path)
        assert all(torch.equal(one, before[name]) for name, one in other.state_dict().items())


def test_nvfp4_and_fp8_of_another_tool_are_loaded_together(tmp_path: pathlib.Path) -> None:
    """NVIDIA's mixed checkpoints: NVFP4 in some layers, FP8 with one scale for the matrix in others."""
    model = nn.ModuleDict({"a": nn.Linear(48, 32, bias=False), "b": nn.Linear(48, 32, bias=False)})
    weight, scale = quantize_nvfp4(torch.randn(32, 48), "rtn"), torch.tensor(0.5)
    codes = torch.randn(32, 48).to(torch.float8_e4m3fn)
    four = {"a.weight": weight.codes, "a.weight_scale": weight.block_scales, "a.weight_scale_2": weight.global_scale}
    eight = {"b.weight": codes, "b.weight_scale": scale, "b.input_scale": torch.tensor(0.1)}
    write(tmp_path, {**four, **eight, "a.input_scale": torch.tensor(0.1)})
    load_checkpoint(model, tmp_path, activations="fp8")
    assert isinstance(model["a"], NVFP4Linear) and isinstance(model["b"], FP8Linear)
    assert torch.equal(model["a"].dequantize(), weight.dequantize()) and model["a"].activations is None
    assert torch.equal(model["b"].dequantize(), codes.float() * 0.5)
    assert float(model["b"].input_scale) == pytest.approx(0.1)
