"""Tensors in checkpoints go by the names that a model was published under, packed or not."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    HrmTextConfig,
    HrmTextForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    SiglipVisionConfig,
    XLMRobertaConfig,
    XLMRobertaForCausalLM,
)

from fp8_compile import PackConfig, load_checkpoint, pack, pack_folder, save_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
PARTS = {
    ("nvfp4", "compressed-tensors"): ("weight_packed", "weight_scale", "weight_global_scale"),
    ("nvfp4", "modelopt"): ("weight", "weight_scale", "weight_scale_2"),
    ("fp8", "compressed-tensors"): ("weight", "weight_scale"),
}


def filled(model: PreTrainedModel) -> PreTrainedModel:
    """Weights that no initialization would give."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.1)
    model.tie_weights()
    return model.eval().requires_grad_(False)


def llava() -> PreTrainedModel:
    """Published as ``language_model.model.layers``, ``vision_tower.vision_model``; here ``model.language_model.layers``
    and so on. Its vision tower initializes the weights of children."""
    vision = SiglipVisionConfig(**SIZES, image_size=28, patch_size=14)
    text = LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=64, max_position_embeddings=64)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=1, vision_feature_layer=-1)
    return filled(LlavaForConditionalGeneration(config))


def hrm(**options: Any) -> PreTrainedModel:
    """Published with one matrix for the gate, q, k and v of attention, and with one for gate and up; here apart."""
    sizes = SIZES | {"num_hidden_layers": 2, "num_layers_per_stack": 1, "head_dim": 16, **options}
    return filled(HrmTextForCausalLM(HrmTextConfig(**sizes, vocab_size=64, max_position_embeddings=64)))


def roberta() -> PreTrainedModel:
    """Its head comes first, and is tied to the embedding."""
    return filled(XLMRobertaForCausalLM(XLMRobertaConfig(**SIZES, vocab_size=64, is_decoder=True)))


def stored(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same(model: nn.Module, other: nn.Module) -> None:
    assert other.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name].float(), value.float()), name


@pytest.mark.parametrize("format, layout", PARTS)
@pytest.mark.parametrize("make", [llava, hrm, roberta])
def test_a_packed_model_is_stored_by_the_names_of_the_plain_one(make, format, layout, tmp_path: pathlib.Path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "plain")
    plain = stored(tmp_path / "plain")
    pack(model, format, method="rtn" if format == "nvfp4" else None, progress=False)
    save_checkpoint(model, tmp_path / "packed", layout)
    found, parts = stored(tmp_path / "packed"), PARTS[format, layout]
    packed = {name.removesuffix(f".{parts[1]}") for name in found if name.endswith(f".{parts[1]}")}
    assert packed and {f"{name}.weight" for name in packed} <= plain.keys()
    left = plain.keys() - {f"{name}.weight" for name in packed}
    assert found.keys() == left | {f"{name}.{part}" for name in packed for part in parts}
    for name in left:
        assert torch.equal(found[name], plain[name]), name
    said = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]["ignore"]
    named = {name for name in said if not name.startswith("re:")}
    assert named and {f"{name}.weight" for name in named - {"lm_head", "lm_head.decoder"}} <= left
    if make is hrm and format == "nvfp4":  # layers that are stored as one have one global scale
        model = load_checkpoint(hrm(), tmp_path / "packed")
    assert_same(model, load_checkpoint(make(), tmp_path / "packed"))
    auto = AutoModelForImageTextToText if make is llava else AutoModelForCausalLM
    other, loading = auto.from_pretrained(
        tmp_path / "packed", quantization_config=PackConfig(layout=layout), output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_same(model, other)
    other.save_pretrained(tmp_path / "again")
    again = stored(tmp_path / "again")
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name].float(), one.float()) for name, one in found.items())


@pytest.mark.parametrize("mixed", [False, True], ids=["one format", "mixed formats"])
def test_transformers_finds_the_layers_of_a_model_that_it_renames(mixed, tmp_path: pathlib.Path) -> None:
    model = llava().to(torch.bfloat16)
    if mixed:
        pack(model, "fp8", include=("*_tower",), progress=False)
    pack(model, method="rtn", exclude=() if mixed else ("*_tower",), progress=False)  # theirs has no tower in NVFP4
    save_checkpoint(model, tmp_path)
    theirs, loading = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(2, 10)[None]
    torch.testing.assert_close(theirs(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0.02, atol=0.02)


def test_layers_that_are_stored_as_one_are_packed_alike(tmp_path: pathlib.Path) -> None:
    model = hrm()
    pack(model, method="rtn", exclude=("*.gate_proj",), progress=False)
    with pytest.raises(ValueError, match=r"one matrix for .*q_proj, which is packed, and .*gate_proj.*pack both alike"):
        save_checkpoint(model, tmp_path)


def test_of_layers_that_are_stored_as_one_some_are_packed_while_they_are_loaded(tmp_path: pathlib.Path) -> None:
    model = hrm()
    model.save_pretrained(tmp_path)
    patterns = ("*.gate_proj", "*.k_proj")  # the first of the four that are stored as one, and one in the middle
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=PackConfig(method="rtn", exclude=patterns)
    )
    pack(model, method="rtn", exclude=patterns, progress=False)
    assert_same(model, other)


def test_experts_of_a_model_that_was_loaded_from_whole_stacks_are_stored_one_by_one(tmp_path: pathlib.Path) -> None:
    from mixtures import mixtral

    mixtral().save_pretrained(tmp_path / "stacks", save_original_format=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stacks")
    pack(model, method="rtn", progress=False)
    save_checkpoint(model, tmp_path / "packed")
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight_packed" in stored(tmp_path / "packed")
    assert_same(model, load_checkpoint(mixtral(), tmp_path / "packed"))


def test_blocks_of_rows_that_a_checkpoint_tears_apart_are_refused_by_name(tmp_path: pathlib.Path) -> None:
    model = hrm(num_attention_heads=4)
    model.save_pretrained(tmp_path / "plain")
    pack_folder(tmp_path / "plain", tmp_path / "packed", format="fp8_blocks", progress=False)  # of the whole matrices
    with pytest.raises(ValueError, match=r"layers\.0\.\S+: checkpoints and models have its rows in different places"):
        load_checkpoint(model, tmp_path / "packed")
