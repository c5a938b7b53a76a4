"""Checkpoints: bytes as other tools read them, and back."""

from __future__ import annotations

import copy
import json
import pathlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fp8_compile import calibrate, load_checkpoint, pack, pack_folder, quantize_nvfp4, save_checkpoint
from fp8_compile.kernels.nvfp4 import e2m1
from fp8_compile.packing import formats
from fp8_compile.packing.checkpoints.save_and_load import read_tensors
from fp8_compile.packing.packed_linear import NVFP4Linear

LAYER = "model.layers.0"


def llama(**options: object) -> LlamaForCausalLM:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, **options)).eval()


def packed_llama(**options: object) -> LlamaForCausalLM:
    model = llama()
    pack(model, progress=False, **options)
    return model


IDS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_model_comes_back_from_its_checkpoint(layout: str, tmp_path: pathlib.Path) -> None:
    model = packed_llama()
    save_checkpoint(model, tmp_path, layout, shard_bytes=20_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1 and not list(tmp_path.glob(".*"))
    other = load_checkpoint(llama(), tmp_path)
    assert isinstance(other.get_submodule(f"{LAYER}.mlp.up_proj"), NVFP4Linear)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name].float(), value.float()), name
    assert torch.equal(other(IDS).logits, model(IDS).logits)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "llama" and config["quantization_config"]["ignore"] == ["lm_head"]
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    if layout == "modelopt":
        described = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
        assert described["quant_algo"] == "W4A16_NVFP4" and described["exclude_modules"] == ["lm_head"]


def test_compressed_tensors_decompresses_our_bytes_to_our_weights(tmp_path: pathlib.Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = packed_llama()
    save_checkpoint(model, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(stored)
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("self_attn.q_proj", "mlp.down_proj"):
        name = f"{LAYER}.{part}."
        local = {key.removeprefix(name): value for key, value in tensors.items() if key.startswith(name)}
        theirs = compressor.decompress(local, scheme)["weight"]
        weight = model.get_submodule(f"{LAYER}.{part}").nvfp4
        # In their order: block scale over their reciprocal global scale, in FP32, then the value; to bf16.
        scale = weight.block_scales.float() / weight.global_scale.reciprocal()
        values = e2m1.values_of(e2m1.unpack(weight.codes)).unflatten(1, (-1, 16))
        expected = (values * scale.unsqueeze(-1)).flatten(1).to(theirs.dtype)
        assert torch.equal(theirs, expected)
        torch.testing.assert_close(theirs.float(), weight.dequantize(), rtol=1e-2, atol=0)


def test_fp8_checkpoints_are_compressed_tensors_own(tmp_path: pathlib.Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = packed_llama(format="fp8")
    save_checkpoint(model, tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(stored)
    compressor = BaseCompressor.get_value_from_registry(config.format)
    name = f"{LAYER}.mlp.up_proj"
    local = {k.removeprefix(f"{name}."): v for k, v in read_tensors(tmp_path).items() if k.startswith(f"{name}.")}
    theirs = compressor.decompress(local, config.config_groups["group_0"])["weight"]
    torch.testing.assert_close(theirs.float(), model.get_submodule(name).dequantize(), rtol=1e-2, atol=1e-6)
    torch.testing.assert_close(load_checkpoint(llama(), tmp_path)(IDS).logits, model(IDS).logits)


def test_fp8_inputs_are_stored_as_compressed_tensors_says_and_come_back(tmp_path: pathlib.Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    calibration = calibrate(llama(), [IDS], progress=False)
    name = f"{LAYER}.self_attn.q_proj"
    for kind, given in (("tensor", calibration), ("token", None)):
        model = packed_llama(format="fp8", activations="fp8", calibration=given)
        save_checkpoint(model, tmp_path / kind)
        stored = json.loads((tmp_path / kind / "config.json").read_text())["quantization_config"]
        inputs = QuantizationConfig.model_validate(stored).config_groups["group_0"].input_activations
        assert (inputs.strategy, inputs.dynamic, inputs.num_bits) == (kind, given is None, 8)
        other = load_checkpoint(llama(), tmp_path / kind, activations="fp8")
        assert torch.equal(other(IDS).logits, model(IDS).logits)
        layer = other.get_submodule(name)
        assert layer.inputs == model.get_submodule(name).inputs
        assert layer.input_scale is other.get_submodule(f"{LAYER}.self_attn.v_proj").input_scale
        assert load_checkpoint(llama(), tmp_path / kind).get_submodule(name).activations is None
    with pytest.raises(ValueError, match="activations='int8' with fp8 weights; expected one of: None, 'fp8'"):
        load_checkpoint(llama(), tmp_path / "token", activations="int8")
    model.get_submodule(name).use_activations("fp8", torch.tensor(1.0))
    with pytest.raises(ValueError, match="q_proj: FP8, inputs e4m3, static scale; .*pack them alike"):
        save_checkpoint(model, tmp_path / "mixed")


def test_layers_that_servers_fuse_share_a_global_scale_even_if_packed_apart(tmp_path: pathlib.Path) -> None:
    model = llama()
    q, k = (model.get_submodule(f"{LAYER}.self_attn.{name}") for name in ("q_proj", "k_proj"))
    with torch.no_grad():
        q.weight *= 5
    for name in ("q_proj", "k_proj", "v_proj"):
        pack(model, include=(f"{LAYER}.self_attn.{name}",), progress=False)
    assert not torch.equal(q.global_scale, k.global_scale)
    before = k.dequantize()
    save_checkpoint(model, tmp_path, "modelopt")
    other = load_checkpoint(llama(), tmp_path).get_submodule(f"{LAYER}.self_attn")
    assert torch.equal(other.q_proj.global_scale, other.k_proj.global_scale)
    assert torch.equal(other.q_proj.codes, q.codes)
    assert (other.k_proj.dequantize() - before).norm() < 0.06 * before.norm()


def test_global_scales_a_power_of_two_apart_become_one_and_nothing_else_changes(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = llama()
    attention = model.get_submodule(f"{LAYER}.self_attn")
    with torch.no_grad():
        for projection, size in ((attention.q_proj, 0.25), (attention.k_proj, 1.0), (attention.v_proj, 2.0)):
            projection.weight[0, 0] = size  # the largest element, which the global scale follows
            projection.weight.clamp_(-size, size)
    for name in ("q_proj", "k_proj", "v_proj"):
        pack(model, method="rtn", include=(f"{LAYER}.self_attn.{name}",), progress=False)
    before = {name: getattr(attention, name).dequantize() for name in ("q_proj", "k_proj", "v_proj")}
    assert len({float(getattr(attention, name).global_scale) for name in before}) == 3
    caplog.clear()
    save_checkpoint(model, tmp_path)
    assert not caplog.text
    other = load_checkpoint(llama(), tmp_path).get_submodule(f"{LAYER}.self_attn")
    assert len({float(getattr(other, name).global_scale) for name in before}) == 1
    assert all(torch.equal(getattr(other, name).dequantize(), weight) for name, weight in before.items())


def test_another_tools_checkpoint_is_loaded(tmp_path: pathlib.Path) -> None:
    """As modelopt and llm-compressor write them: with scales for inputs, in FP32 [1], bf16 elsewhere."""
    weight = quantize_nvfp4(torch.randn(32, 48), "rtn")
    model = nn.ModuleDict({"a": nn.Linear(48, 32, dtype=torch.bfloat16)})
    tensors = {
        "a.weight": weight.codes,
        "a.weight_scale": weight.block_scales,
        "a.weight_scale_2": weight.global_scale.reshape(1),
        "a.input_scale": torch.ones(()),
        "a.bias": torch.randn(32, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    load_checkpoint(model, tmp_path, activations="int8")
    assert torch.equal(model["a"].dequantize(), weight.dequantize()) and torch.equal(model["a"].bias, tensors["a.bias"])
    assert model["a"].activations == "int8" and model["a"].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="packs a, which the model does not have"):
        load_checkpoint(nn.ModuleDict({"b": nn.Linear(48, 32)}), tmp_path)
    larger = nn.ModuleDict({"a": nn.Linear(48, 32), "b": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"tensors missing: \['b.weight', 'b.bias'\]"):
        load_checkpoint(larger, tmp_path)


@pytest.mark.parametrize("shape", [(), (1,), (32,), (32, 1), (2, 16)], ids=str)
def test_fp8_of_other_tools_has_a_scale_a_row_or_one_for_all(shape: tuple[int, ...], tmp_path: pathlib.Path) -> None:
    codes, scales = torch.randn(32, 48).to(torch.float8_e4m3fn), torch.rand(shape) + 1
    save_file({"a.weight": codes, "a.weight_scale": scales, "a.bias": torch.zeros(32)}, tmp_path / "model.safetensors")
    model = nn.ModuleDict({"a": nn.Linear(48, 32)})
    if shape == (2, 16):  # blocks, as many as there are rows
        with pytest.raises(ValueError, match=r"a: expected FP8 with one scale per row or one for all.* \(2, 16\)"):
            load_checkpoint(model, tmp_path)
        return
    load_checkpoint(model, tmp_path)
    assert torch.equal(model["a"].dequantize(), codes.float() * (scales if len(shape) != 1 else scales[:, None]))
    assert model["a"].scales.shape == (32,), "the kernels read one a row"


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path: pathlib.Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(32, 64)})
    pack(model, progress=False)
    save_checkpoint(model, tmp_path)
    with pytest.raises(ValueError, match=r"a: the checkpoint has a weight of \[64, 32\], the model's is \[64, 48\]"):
        load_checkpoint(nn.ModuleDict({"a": nn.Linear(48, 64)}), tmp_path)


def test_a_layer_in_two_places_is_stored_once_and_in_the_layouts_words(tmp_path: pathlib.Path) -> None:
    layer = nn.Linear(32, 32)
    model, other = nn.ModuleDict({"a": layer, "b": layer}), nn.Linear(32, 32)
    pack(model, progress=False)
    save_checkpoint(model, tmp_path)
    parts = ("bias", "weight_packed", "weight_scale", "weight_global_scale")
    assert set(load_file(tmp_path / "model.safetensors")) == {f"a.{part}" for part in parts}
    load_checkpoint(nn.ModuleDict({"a": other, "b": other}), tmp_path)
    torch.testing.assert_close(other.dequantize(), layer.dequantize())


def test_a_checkpoint_that_is_written_over_another_leaves_nothing_of_it(tmp_path: pathlib.Path) -> None:
    old, new = packed_llama(), packed_llama()
    save_checkpoint(old, tmp_path, "modelopt", shard_bytes=20_000)
    (tmp_path / "model_card.safetensors").write_bytes(b"")  # somebody else's, neither removed nor read
    save_checkpoint(new, tmp_path)
    files = {"config.json", "generation_config.json", "model.safetensors", "model_card.safetensors"}
    assert {file.name for file in tmp_path.iterdir()} == files
    torch.testing.assert_close(load_checkpoint(llama(), tmp_path)(IDS).logits, new(IDS).logits, rtol=1e-4, atol=1e-5)
    half = packed_llama(exclude=("*.q_proj",))
    pack(half, "fp8", progress=False)
    with pytest.raises(ValueError, match="one layer of .*q_proj: FP8, exact inputs; .*v_proj: NVFP4"):
        save_checkpoint(half, tmp_path)
    load_checkpoint(llama(), tmp_path)  # as it was

    llama().save_pretrained(tmp_path / "in")
    save_checkpoint(old, tmp_path / "out", shard_bytes=20_000)
    pack_folder(tmp_path / "in", tmp_path / "out", progress=False)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


def test_wrong_models_and_layouts_are_errors(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="has no packed layer"):
        save_checkpoint(nn.Linear(4, 4), tmp_path)
    with pytest.raises(ValueError, match="layout='awq' is unknown"):
        save_checkpoint(packed_llama(), tmp_path, "awq")
    odd = nn.ModuleDict({"a": nn.Linear(40, 16)})
    pack(odd, progress=False)
    with pytest.raises(ValueError, match="a: checkpoints hold NVFP4 .* got K=40"):
        save_checkpoint(odd, tmp_path)
    with pytest.raises(ValueError, match="has no safetensors files"):
        load_checkpoint(llama(), tmp_path)


def test_files_that_are_not_whole_are_errors_that_name_them(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("{}\r\n")
    (tmp_path / "model.safetensors").write_bytes(b"<html>")
    for read in (lambda: load_checkpoint(llama(), tmp_path), lambda: pack_folder(tmp_path, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"model.safetensors is not whole, or no safetensors file"):
            read()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no safetensors files"):
        load_checkpoint(llama(), tmp_path)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_folder_is_packed_shard_by_shard_as_the_model_would_be(layout: str, tmp_path: pathlib.Path) -> None:
    source, target, model = tmp_path / "in", tmp_path / "out", llama().bfloat16()
    model.save_pretrained(source, max_shard_size="40KB")
    (source / "tokenizer.json").write_text("{}")
    files = sorted(file.name for file in source.glob("*.safetensors"))
    assert len(files) > 1
    chosen = pack_folder(source, target, layout=layout, exclude=("*.down_proj",), progress=False)
    assert sorted(file.name for file in target.glob("*.safetensors")) == files and not list(target.glob(".*"))
    assert len(chosen) == 6 and (target / "tokenizer.json").exists()
    pack(model, exclude=("*.down_proj",), progress=False)
    other = load_checkpoint(llama().bfloat16(), target)
    for name, value in model.state_dict().items():
        if not name.endswith("global_scale"):
            assert torch.equal(other.state_dict()[name].float(), value.float()), name
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    # The head is tied, so that no file has it; yet transformers would take it for packed.
    assert set(config["ignore"]) == {f"{LAYER}.mlp.down_proj", "model.embed_tokens", "lm_head"}
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        with safe_open(target / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118


def test_folders_say_which_matrices_are_not_packed_and_refuse_those_that_are_transposed(tmp_path: pathlib.Path) -> None:
    from transformers import AlbertConfig, AlbertModel, GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 32, "hidden_size": 64, "embedding_size": 32, "intermediate_size": 64}
    AlbertModel(AlbertConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path / "albert")
    pack_folder(tmp_path / "albert", tmp_path / "packed", progress=False)
    ignored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "encoder.embedding_hidden_mapping_in" in ignored, "a linear layer, whatever it is called"
    GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=32)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"a gpt2 model, whose weights are stored \[K, N\]; load the model"):
        pack_folder(tmp_path / "gpt2", tmp_path / "packed", progress=False)


def test_an_interrupted_run_leaves_nothing_that_looks_whole(tmp_path: pathlib.Path, monkeypatch) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    llama().save_pretrained(source, max_shard_size="60KB")
    calls = []

    def interrupted(*args: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return quantize_nvfp4(*args, **options)

    monkeypatch.setattr(formats, "quantize_nvfp4", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack_folder(source, target, progress=False)
    written = {file.name for file in target.iterdir()}
    assert "config.json" not in written and not any(name.endswith(".part") for name in written)
    assert 0 < len(written) < len(list(source.glob("*.safetensors")))
    for file in target.glob("*.safetensors"):
        load_file(file)  # whole
    monkeypatch.undo()
    pack_folder(source, target, progress=False)
    load_checkpoint(copy.deepcopy(llama()), target)
    with pytest.raises(ValueError, match="is quantized already"):
        pack_folder(target, tmp_path / "again", progress=False)
    with pytest.raises(ValueError, match="method='gptq'; without the model's activations"):
        pack_folder(source, tmp_path / "again", method="gptq", progress=False)
    with pytest.raises(ValueError, match="has no config.json"):
        pack_folder(tmp_path, tmp_path / "again", progress=False)
