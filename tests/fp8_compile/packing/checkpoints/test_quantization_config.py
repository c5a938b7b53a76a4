"""Configurations of packed checkpoints, read by vLLM's rules as its source of August 2026 has them: the table in
docs/interchange.md."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mixtures import mixtral, qwen
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from fp8_compile import calibrate, load_checkpoint, pack, save_checkpoint
from fp8_compile.kernels.nvfp4.weight import NEAREST_RANGE, SEARCH_RANGE, global_scale_of

IDS = torch.arange(12).view(2, 6)
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def matches(name: str, target: str) -> bool:
    return re.match(target[3:], name) is not None if target.startswith("re:") else name == target


def group_of(config: dict[str, Any], name: str, kind: str) -> dict[str, Any] | None:
    """The group that vLLM stores a layer of its own by: ignored names, then names, then classes, then parts."""
    own = name.rpartition(".")[2]
    parts = [name.replace(own, part) for part in FUSED.get(own, (own,))]
    ignored = {any(matches(part, target) for target in config["ignore"]) for part in parts}
    assert len(ignored) == 1, f"{name}: some of its parts are ignored"
    if ignored == {True}:
        return None
    targets = {target: group for group in config["config_groups"].values() for target in group["targets"]}
    if "Linear" in targets:
        targets["RoutedExperts"] = targets["Linear"]
    for found in (
        [one for target, one in targets.items() if matches(name, target)],
        [one for target, one in targets.items() if target.lower() in kind.lower()],
        [one for part in parts for target, one in targets.items() if matches(part, target)],
    ):
        if found:
            return found[0]
    return None


def group_of_experts(config: dict[str, Any], module: str) -> dict[str, Any] | None:
    """The group of a module of experts: vLLM asks for the first expert's layers by Llama's names."""
    groups = [group_of(config, f"{module}.0.{own}", "RoutedExperts") for own in ("gate_proj", "up_proj", "down_proj")]
    assert all(one == groups[0] for one in groups), "one scheme for all of a module's experts"
    return groups[0]


def saved(model: nn.Module, folder: pathlib.Path, layout: str = "compressed-tensors") -> dict[str, Any]:
    save_checkpoint(model, folder, layout)
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("make", [qwen, mixtral])
def test_a_router_is_not_taken_for_a_packed_layer(make, tmp_path: pathlib.Path) -> None:
    model = make()
    pack(model, method="rtn", progress=False)
    config, name = saved(model, tmp_path), "mlp" if make is qwen else "block_sparse_moe"
    assert group_of(config, f"model.layers.0.{name}.gate", "ReplicatedLinear") is None
    assert group_of(config, "model.layers.0.self_attn.qkv_proj", "QKVParallelLinear")["weights"]["num_bits"] == 4
    assert group_of_experts(config, f"model.layers.0.{name}.experts")["format"] == "nvfp4-pack-quantized"


@pytest.mark.parametrize("activations", [None, "fp8"])
def test_fp8_experts_have_inputs_in_fp8(activations: str | None, tmp_path: pathlib.Path) -> None:
    """vLLM takes FP8 weights with exact inputs for a packed integer format where they are experts'."""
    model = mixtral()
    pack(model, "fp8", activations=activations, progress=False)
    config = saved(model, tmp_path)
    experts = group_of_experts(config, "model.layers.0.block_sparse_moe.experts")
    assert experts["weights"]["strategy"] == "channel" and experts["input_activations"]["strategy"] == "token"
    assert experts["input_activations"]["dynamic"] is True
    attention = group_of(config, "model.layers.0.self_attn.qkv_proj", "QKVParallelLinear")
    assert attention["input_activations"] == (activations and experts["input_activations"])


@pytest.mark.parametrize("make", [qwen, mixtral])
def test_fp8_attention_and_nvfp4_experts_are_one_checkpoint(make, tmp_path: pathlib.Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    model = make()
    pack(model, "fp8", activations="fp8", exclude=("*.experts",), progress=False)
    pack(model, method="rtn", include=("*.experts*",), progress=False)
    config = saved(model, tmp_path)
    assert config["format"] == "mixed-precision" and len(QuantizationConfig.model_validate(config).config_groups) == 2
    attention = group_of(config, "model.layers.0.self_attn.qkv_proj", "QKVParallelLinear")
    assert (attention["format"], attention["input_activations"]["strategy"]) == ("float-quantized", "token")
    name = "mlp" if make is qwen else "block_sparse_moe"
    assert group_of_experts(config, f"model.layers.0.{name}.experts")["format"] == "nvfp4-pack-quantized"
    other = load_checkpoint(make(), tmp_path, activations="fp8")
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_experts_that_are_not_packed_are_ignored_by_the_names_that_vllm_asks_for(tmp_path: pathlib.Path) -> None:
    model = mixtral()
    pack(model, method="rtn", exclude=("*.experts",), progress=False)
    assert group_of_experts(saved(model, tmp_path), "model.layers.0.block_sparse_moe.experts") is None


def test_modelopt_holds_fp8_by_rows_and_several_formats(tmp_path: pathlib.Path) -> None:
    model = qwen()
    pack(model, "fp8", activations="fp8", exclude=("*.experts",), progress=False)
    config = saved(model, tmp_path / "one", "modelopt")
    assert config["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert load_file(tmp_path / "one/model.safetensors")["model.layers.0.self_attn.o_proj.weight_scale"].dim() == 1
    assert "model.layers.0.mlp.experts" in config["ignore"]
    pack(model, method="rtn", include=("*.experts*",), progress=False)
    config = saved(model, tmp_path / "two", "modelopt")
    layers = config["quantized_layers"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert layers["model.layers.0.mlp.experts"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    assert layers["model.layers.0.self_attn.q_proj"] == {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    described = json.loads((tmp_path / "two/hf_quant_config.json").read_text())["quantization"]
    assert described["quantized_layers"] == layers and described["exclude_modules"] == config["ignore"]
    other = load_checkpoint(qwen(), tmp_path / "two", activations="fp8")
    assert torch.equal(other(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("make", [qwen, mixtral])
def test_with_a_calibration_nvfp4_has_the_scales_of_its_inputs(make, tmp_path: pathlib.Path) -> None:
    """W4A4: vLLM divides by input_global_scale, TensorRT-LLM multiplies by input_scale: amax / (448 * 6)."""
    from compressed_tensors.quantization import QuantizationConfig

    model = make()
    calibration = calibrate(model, [IDS], hessians=False, progress=False)
    pack(model, method="rtn", progress=False)
    save_checkpoint(model, tmp_path / "one", calibration=calibration)
    save_checkpoint(model, tmp_path / "two", "modelopt", calibration=calibration)
    config = json.loads((tmp_path / "one/config.json").read_text())["quantization_config"]
    (group,) = QuantizationConfig.model_validate(config).config_groups.values()
    assert (group.input_activations.num_bits, group.input_activations.dynamic) == (4, "local")
    algorithm = json.loads((tmp_path / "two/hf_quant_config.json").read_text())["quantization"]["quant_algo"]
    assert algorithm == "NVFP4"
    ours, modelopts = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    query = "model.layers.0.self_attn.q_proj"
    assert tuple(ours[f"{query}.input_global_scale"].shape) == (1,) and modelopts[f"{query}.input_scale"].dim() == 0
    scale = calibration.amax(query) / (448 * 6)
    torch.testing.assert_close(ours[f"{query}.input_global_scale"].reciprocal().squeeze(), scale)
    torch.testing.assert_close(modelopts[f"{query}.input_scale"], scale)
    # Some experts saw no token; all of a stack have the largest that any saw.
    of_experts = {float(one) for name, one in ours.items() if "experts" in name and name.endswith("input_global_scale")}
    assert len(of_experts) == 2  # gate and up, and down
    assert torch.equal(load_checkpoint(make(), tmp_path / "one")(IDS).logits, model(IDS).logits)


def test_a_calibration_is_refused_where_no_nvfp4_layer_could_use_it(tmp_path: pathlib.Path) -> None:
    model = mixtral()
    calibration = calibrate(model, [IDS], hessians=False, layers=["model.layers.0.self_attn.q_proj"], progress=False)
    pack(model, method="rtn", include=("*_proj",), progress=False)
    with pytest.raises(ValueError, match="k_proj.*no calibration batch reached it"):
        save_checkpoint(model, tmp_path, calibration=calibration)
    model = mixtral()
    pack(model, "fp8", progress=False)
    with pytest.raises(ValueError, match="the model has no NVFP4 layer"):
        save_checkpoint(model, tmp_path, calibration=calibration)
    assert not list(tmp_path.iterdir())


def test_transformers_reads_two_groups_of_fp8(tmp_path: pathlib.Path) -> None:
    model = mixtral()
    pack(model, "fp8", progress=False)
    assert len(saved(model, tmp_path)["config_groups"]) == 2
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(theirs(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-6)


@given(st.floats(2.0**-100, 2.0**100), st.sampled_from([NEAREST_RANGE, SEARCH_RANGE]))
def test_a_global_scale_is_the_reciprocal_of_its_reciprocal(amax: float, block_range: float) -> None:
    scale = global_scale_of(torch.tensor(amax), block_range)
    assert torch.equal(scale.reciprocal().reciprocal(), scale)
    torch.testing.assert_close(scale.double(), torch.tensor(amax).double() / (block_range * 6), rtol=2.0**-22, atol=0)
