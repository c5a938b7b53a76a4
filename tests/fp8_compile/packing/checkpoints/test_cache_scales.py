"""Static scales of an FP8 cache in checkpoints: what is written, who reads it, and that they come back."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from mixtures import qwen
from safetensors.torch import load_file
from speaker import speaker
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import fp8_compile
from fp8_compile import Fp8Cache, PackConfig, load_checkpoint, pack, save_checkpoint

IDS = torch.arange(3, 15).view(2, 6)
ATTENTION = "model.layers.{}.self_attn"


def packed(make: Any, heads: str) -> nn.Module:
    """A model with static scales, of each head or the same for all heads of a layer."""
    model = make()
    calibration = fp8_compile.calibrate(model, [IDS], hessians=False, progress=False)
    pack(model, method="rtn", calibration=calibration, kv_cache="fp8_static", progress=False)
    if heads == "alike":
        for keys, values in model._fp8_cache_scales.values():
            keys.fill_(keys.max()), values.fill_(values.max())
    return model


def untrained(**options: Any) -> nn.Module:
    return speaker(steps=0, **options)


def mixture() -> nn.Module:
    return qwen(num_key_value_heads=2, num_hidden_layers=2)


def scales_of(model: nn.Module) -> list[Tensor]:
    return [scale for layer in Fp8Cache(model).layers for scale in (layer.key_scales, layer.value_scales)]


def config_of(folder: pathlib.Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("make", [untrained, mixture])
@pytest.mark.parametrize("heads", ["apart", "alike"])
def test_scales_come_back_bit_for_bit_from_compressed_tensors(make: Any, heads: str, tmp_path: pathlib.Path) -> None:
    model = packed(make, heads)
    save_checkpoint(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    shape = (2, 1, 1) if heads == "apart" else (1,)
    names = [f"{ATTENTION.format(layer)}.{side}_scale" for layer in range(2) for side in "kv"]
    assert {tuple(stored[name].shape) for name in names} == {shape}
    said = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    said["strategy"] = "attn_head" if heads == "apart" else "tensor"
    assert config_of(tmp_path)["kv_cache_scheme"] == said
    assert QuantizationConfig(**config_of(tmp_path)).kv_cache_scheme.strategy == said["strategy"]

    loaded = load_checkpoint(make(), tmp_path, kv_cache="fp8_static")
    asked = PackConfig(kv_cache="fp8_static")
    auto = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=asked).eval()
    for other in (loaded, auto):
        assert all(map(torch.equal, scales_of(other), scales_of(model)))
    assert torch.equal(loaded.generate(IDS, max_new_tokens=6), model.generate(IDS, max_new_tokens=6))
    auto.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], stored[name]) for name in names)
    assert config_of(tmp_path / "again")["kv_cache_scheme"] == said


def test_modelopt_has_the_largest_scale_of_a_layer(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    model = packed(untrained, "apart")
    save_checkpoint(model, tmp_path, "modelopt")
    assert "the largest is written. layout='compressed-tensors' keeps a scale for each head" in caplog.text
    stored = load_file(tmp_path / "model.safetensors")
    keys, values = model._fp8_cache_scales[1]
    assert torch.equal(stored[f"{ATTENTION.format(1)}.k_proj.k_scale"], keys.max())
    assert torch.equal(stored[f"{ATTENTION.format(1)}.v_proj.v_scale"], values.max())
    assert config_of(tmp_path)["kv_cache_scheme"] == {"num_bits": 8, "type": "float", "dynamic": False}
    described = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert described["quantization"]["kv_cache_quant_algo"] == "FP8"
    loaded = load_checkpoint(untrained(), tmp_path, kv_cache="fp8_static")
    assert torch.equal(scales_of(loaded)[2], keys.max().expand(2))
    caplog.clear()
    save_checkpoint(loaded, tmp_path, "modelopt")
    assert not caplog.text


@pytest.mark.parametrize("kv_cache", [None, "fp8"])
def test_a_cache_without_static_scales_leaves_nothing_in_a_checkpoint(
    kv_cache: str | None, tmp_path: pathlib.Path
) -> None:
    model = untrained()
    pack(model, method="rtn", kv_cache=kv_cache, progress=False)
    save_checkpoint(model, tmp_path)
    assert not [name for name in load_file(tmp_path / "model.safetensors") if name.endswith(("k_scale", "v_scale"))]
    assert config_of(tmp_path)["kv_cache_scheme"] is None


def test_scales_of_a_layer_that_no_module_says_it_is_are_an_error(tmp_path: pathlib.Path) -> None:
    model = packed(untrained, "apart")
    del model.model.layers[1].self_attn.layer_idx
    with pytest.raises(ValueError, match="layer 1 of the key-value cache has static scales.*kv_cache='fp8'"):
        save_checkpoint(model, tmp_path)
    assert not list(tmp_path.iterdir())
