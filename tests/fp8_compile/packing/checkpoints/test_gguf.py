"""GGUF files: read by the gguf package, and run by llama.cpp."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from mixtures import qwen
from speaker import TEXT, speaker, spoken, tokenizer
from torch import nn

from fp8_compile import pack, save_checkpoint
from fp8_compile.packing.checkpoints.gguf_vocabulary import SPLITS

LAYER = "model.layers.0"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
# In a process of its own: where llama.cpp does not like a file it ends the process.
RUN = """
import json, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = sys.argv[1], 128, 1, False, 0
params.cpuparams.n_threads = 1
asked = {"prompt": sys.argv[2], "max_tokens": 40, "temperature": 0}
print(json.dumps(xllamacpp.Server(params).handle_completions(asked)))
"""


def run_by_llama_cpp(file: pathlib.Path, prompt: str) -> dict[str, Any]:
    pytest.importorskip("xllamacpp")
    ran = subprocess.run(
        [sys.executable, "-c", RUN, str(file), prompt], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


def llama(**options: Any) -> nn.Module:
    return speaker(steps=0, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e3, **LLAMA3}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **YARN}},
        {"kind": "mistral", "attention_bias": False},
        {"kind": "qwen3", "tie_word_embeddings": True},
    ],
    ids=["tied", "llama3", "linear", "yarn", "mistral", "qwen3"],
)
def test_llama_cpp_says_what_our_packed_model_says(options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    model = speaker(**options)
    pack(model, method="rtn", progress=False)
    save_checkpoint(model, tmp_path, "gguf", tokenizer())
    ours = spoken(model, TEXT[:9])
    theirs = run_by_llama_cpp(tmp_path / "model.gguf", TEXT[:9])
    assert TEXT[:9] + ours == TEXT  # the model is sure of every token
    assert theirs["choices"][0]["text"] == ours
    assert theirs["usage"]["prompt_tokens"] == len(tokenizer()(TEXT[:9])["input_ids"])
    assert theirs["choices"][0]["finish_reason"] == "stop"  # it knows the end of a text


@pytest.mark.parametrize("split", [split for split in SPLITS if split], ids=["llama-bpe", "qwen2"])
def test_llama_cpp_splits_texts_as_the_tokenizer_does(split: str, tmp_path: pathlib.Path) -> None:
    model = speaker(split=split)
    pack(model, method="rtn", progress=False)
    save_checkpoint(model, tmp_path, "gguf", tokenizer(split))
    theirs = run_by_llama_cpp(tmp_path / "model.gguf", TEXT[:9])
    assert TEXT[:9] + theirs["choices"][0]["text"] == TEXT
    odd = "12345 don't  STOP\n\n it's  ünïcode"
    theirs = run_by_llama_cpp(tmp_path / "model.gguf", odd)
    assert theirs["usage"]["prompt_tokens"] == len(tokenizer(split)(odd)["input_ids"])


def test_ggufs_reader_and_dequantizer_give_our_weights(tmp_path: pathlib.Path) -> None:
    model = llama(num_hidden_layers=1)
    pack(model, progress=False)
    save_checkpoint(model, tmp_path, "gguf", tokenizer())
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert reader.fields["llama.block_count"].contents() == 1
    assert reader.fields["llama.attention.head_count"].contents() == 4
    assert reader.fields["tokenizer.ggml.model"].contents() == "gpt2"
    down = tensors["blk.0.ffn_down.weight"]
    assert down.tensor_type == gguf.GGMLQuantizationType.NVFP4
    weight = model.get_submodule(f"{LAYER}.mlp.down_proj").nvfp4
    unscaled = gguf.quants.dequantize(down.data, down.tensor_type)
    assert np.array_equal(tensors["blk.0.ffn_down.scale"].data, [weight.global_scale.item()])
    assert torch.equal(torch.from_numpy(unscaled) * weight.global_scale, weight.dequantize())
    # Of q and k the rows are in the order of llama.cpp's rotary embedding.
    q = gguf.quants.dequantize(tensors["blk.0.attn_q.weight"].data, down.tensor_type)
    ours = model.get_submodule(f"{LAYER}.self_attn.q_proj").nvfp4
    order = torch.arange(64).view(4, 2, 8).transpose(1, 2).reshape(-1)
    assert torch.equal(torch.from_numpy(q.copy()) * ours.global_scale, ours.dequantize()[order])
    norm = tensors["blk.0.attn_norm.weight"].data
    assert np.array_equal(norm, model.model.layers[0].input_layernorm.weight.detach().numpy())
    assert reader.fields["llama.attention.key_length"].contents() == 16
    odd = nn.Sequential(nn.Linear(48, 16))
    pack(odd, progress=False)
    with pytest.raises(ValueError, match="K a multiple of 64"):
        save_checkpoint(odd, tmp_path / "odd", "gguf")


def test_gguf_has_the_rows_of_q_and_k_in_order_where_they_are_not_packed_too(tmp_path: pathlib.Path) -> None:
    model = llama(attention_bias=True)
    nn.init.normal_(model.get_submodule(f"{LAYER}.self_attn.k_proj").bias)
    pack(model, exclude=("*.q_proj",), progress=False)
    save_checkpoint(model, tmp_path, "gguf", tokenizer())
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    attention = model.get_submodule(f"{LAYER}.self_attn")
    for ours, theirs, heads in [(attention.q_proj.weight, "q.weight", 4), (attention.k_proj.bias, "k.bias", 2)]:
        order = torch.arange(16 * heads).view(heads, 2, 8).transpose(1, 2).reshape(-1)
        assert np.array_equal(tensors[f"blk.0.attn_{theirs}"], ours.detach()[order].numpy())


def test_what_gguf_does_not_hold_is_sent_to_the_converter(tmp_path: pathlib.Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    command = r"python convert_hf_to_gguf.py out --outfile model.gguf"
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=320, n_positions=48))
    pack(model, progress=False)
    with pytest.raises(ValueError, match=f"GPT2LMHeadModel: .*llama, mistral, qwen3, got gpt2; .*{command}"):
        save_checkpoint(model, tmp_path, "gguf", tokenizer())
    mixture = qwen()
    pack(mixture, method="rtn", include=("*.experts*",), progress=False)
    with pytest.raises(ValueError, match=f"experts.gate_up_proj: layout='gguf' holds no experts; .*{command}"):
        save_checkpoint(mixture, tmp_path, "gguf", tokenizer())
    model = llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    pack(model, method="rtn", progress=False)
    with pytest.raises(ValueError, match=f"rope_type 'dynamic'.*{command}"):
        save_checkpoint(model, tmp_path, "gguf", tokenizer())
    model = llama()
    pack(model, method="rtn", progress=False)
    with pytest.raises(ValueError, match=r"llama.cpp aborts at the first completion; .*tokenizer=\.\.\."):
        save_checkpoint(model, tmp_path, "gguf")
    with pytest.raises(ValueError, match=f"another way to split texts; .*{command}"):
        save_checkpoint(model, tmp_path, "gguf", tokenizer(r"\\w+"))
    with pytest.raises(TypeError, match="tokenizer: expected a tokenizer or processor of transformers.*got str"):
        save_checkpoint(model, tmp_path, "gguf", "tokenizer")
    small = llama(vocab_size=300)
    pack(small, method="rtn", progress=False)
    with pytest.raises(ValueError, match="it has the token 319, and the model has 300"):
        save_checkpoint(small, tmp_path, "gguf", tokenizer())
    assert not list(tmp_path.iterdir())
