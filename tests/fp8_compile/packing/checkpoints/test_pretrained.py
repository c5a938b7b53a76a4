"""``from_pretrained`` and ``save_pretrained`` of transformers with packed layers."""

from __future__ import annotations

import copy
import json
import pathlib
import warnings

import pytest
import torch
from mixtures import mixtral, qwen
from safetensors.torch import load_file, save_file
from speaker import TEXT, speaker, spoken, tokenizer
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

import fp8_compile
from fp8_compile import load_checkpoint, pack, save_checkpoint
from fp8_compile.packing.checkpoints.pretrained import PackQuantizer
from fp8_compile.packing.packed_experts import NVFP4Stack
from fp8_compile.packing.packed_linear import FP8Linear, NVFP4Linear

IDS = torch.arange(12).view(2, 6)
LAYER = "model.layers.0"


@pytest.fixture(autouse=True)
def quiet():
    """What transformers says about missing or unexpected tensors would be an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("make", [speaker, qwen, mixtral])
def test_a_packed_folder_gives_our_layers(make, layout: str, tmp_path: pathlib.Path) -> None:
    model = make()
    pack(model, method="rtn", progress=False)
    save_checkpoint(model, tmp_path, layout)
    other, said = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=fp8_compile.PackConfig(), output_loading_info=True
    )
    assert isinstance(other.get_submodule(f"{LAYER}.self_attn.q_proj"), NVFP4Linear)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert other.state_dict().keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name].float(), value.float()), name
    assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_weights_are_packed_while_they_are_loaded(tmp_path: pathlib.Path, monkeypatch) -> None:
    waiting, pack_group = [], PackQuantizer._pack

    def seen(self: PackQuantizer, model: torch.nn.Module, group: tuple[str, ...]) -> None:
        waiting.append(len(self.waiting))
        pack_group(self, model, group)

    monkeypatch.setattr(PackQuantizer, "_pack", seen)
    model = qwen()
    model.save_pretrained(tmp_path)
    pack(model, method="rtn", progress=False)
    config = fp8_compile.PackConfig(method="rtn")
    other = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert isinstance(other.get_submodule(f"{LAYER}.mlp.experts.gate_up_proj_packed"), NVFP4Stack)
    for name, value in model.state_dict().items():  # q, k and v have one global scale here, too
        assert torch.equal(other.state_dict()[name].float(), value.float()), name
    assert max(waiting) == 3 and len(waiting) == 4  # q, k and v wait for each other, nothing else waits
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=fp8_compile.PackConfig("fp8", activations="fp8", exclude=("*.k_proj",))
    )
    attention = other.get_submodule(f"{LAYER}.self_attn")
    assert isinstance(attention.q_proj, FP8Linear) and attention.q_proj.activations == "fp8"
    assert isinstance(attention.k_proj, torch.nn.Linear)
    with pytest.raises(ValueError, match="exclude pattern 'nothing.like.it' matches no module"):
        config = fp8_compile.PackConfig(exclude=("nothing.like.it",))
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match="format='int3' is unknown"):
        fp8_compile.PackConfig("int3")


def test_a_tied_head_stays_tied(tmp_path: pathlib.Path) -> None:
    model = speaker(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=fp8_compile.PackConfig(method="rtn"))
    assert other.lm_head.weight is other.model.embed_tokens.weight
    assert TEXT[:9] + spoken(other, TEXT[:9]) == TEXT


@pytest.mark.parametrize("make", [speaker, qwen, mixtral])
def test_save_pretrained_writes_what_save_checkpoint_writes(make, tmp_path: pathlib.Path) -> None:
    model = make()
    pack(model, method="rtn", progress=False)
    save_checkpoint(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in ("ours", "theirs")
    )
    assert ours == theirs
    other = load_checkpoint(make(), tmp_path / "theirs")
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", quantization_config=fp8_compile.PackConfig())
    for one in (again, other):
        one.save_pretrained(tmp_path / "again")
        assert torch.equal(load_checkpoint(make(), tmp_path / "again")(IDS).logits, model(IDS).logits)


def test_a_trainer_saves_a_packed_model(tmp_path: pathlib.Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = speaker()
    pack(model, method="rtn", progress=False)
    arguments = TrainingArguments(output_dir=str(tmp_path / "run"), report_to=[], use_cpu=True)
    Trainer(model, arguments, processing_class=tokenizer()).save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved/tokenizer.json").exists()
    assert TEXT[:9] + spoken(load_checkpoint(speaker(steps=0), tmp_path / "saved"), TEXT[:9]) == TEXT


def gpt2() -> PreTrainedModel:
    """A model whose attention initializes the weights of its layers."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=2)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.1)
    return model


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_modules_that_initialize_their_children_leave_packed_weights_alone(packed, tmp_path: pathlib.Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path / "plain")
    pack(model, method="rtn", progress=False)
    save_checkpoint(model, tmp_path / "packed")
    other = AutoModelForCausalLM.from_pretrained(
        tmp_path / ("packed" if packed else "plain"), quantization_config=fp8_compile.PackConfig(method="rtn")
    )
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name].float(), value.float()), name


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_a_bias_that_the_checkpoint_lacks_is_initialized(packed, tmp_path: pathlib.Path, monkeypatch) -> None:
    model = gpt2()
    if packed:
        pack(model, method="rtn", progress=False)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "transformer.h.0.attn.c_proj.bias"
    rest = {name: one for name, one in tensors.items() if name != lost}
    save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda one, **options: empty_like(one, **options).fill_(7))
    other, said = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=fp8_compile.PackConfig(method="rtn"), output_loading_info=True
    )
    assert set(said["missing_keys"]) == {lost}
    assert isinstance(other.transformer.h[0].attn.c_proj, NVFP4Linear)
    assert not other.transformer.h[0].attn.c_proj.bias.any()


def test_adapters_that_transformers_has_taken_are_saved_and_nothing_else(tmp_path: pathlib.Path) -> None:
    from peft import LoraConfig

    model = gpt2()
    pack(model, method="rtn", progress=False)
    base = copy.deepcopy(model)
    model.add_adapter(LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    base.load_adapter(str(tmp_path))
    assert torch.equal(base(IDS).logits, model(IDS).logits)
    with pytest.raises(ValueError, match=r"c_attn has adapters beside its weight.*merge_adapters"):
        save_checkpoint(model, tmp_path / "whole")
