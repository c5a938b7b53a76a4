"""Folders that are packed by what a model does on texts."""

from __future__ import annotations

import pathlib

import pytest
import torch
from mixtures import qwen
from speaker import TEXT, tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from fp8_compile import calibrate, load_checkpoint, pack, pack_folder
from fp8_compile.packing.checkpoints.calibrated_folder import by_block, pack_calibrated_folder, text_batches


def test_a_text_becomes_whole_rows() -> None:
    ids = tokenizer()(TEXT)["input_ids"]
    rows = text_batches(tokenizer(), TEXT, 10, 2)
    assert [row.shape for row in rows] == [(1, 10)] * 2 and rows[1][0].tolist() == ids[10:20]
    assert len(text_batches(tokenizer(), TEXT, 10, 99)) == len(ids) // 10
    assert text_batches(tokenizer(), TEXT, 999, 1)[0][0].tolist() == ids
    with pytest.raises(ValueError, match="the texts have 0 tokens"):
        text_batches(tokenizer(), "", 10, 1)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        text_batches(tokenizer(), TEXT, 1, 1)


def test_weights_are_ordered_by_their_blocks() -> None:
    names = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.experts.down_proj", "model.layers.0.q"]
    first = ["model.layers.0.mlp.up_proj", "model.layers.0.q"]
    assert by_block(names) == [first, ["model.layers.1.mlp.experts.down_proj"], ["lm_head"]]


def test_experts_are_packed_by_their_own_inputs(tmp_path: pathlib.Path) -> None:
    """As ``pack`` does it in memory, to the bit: the only block has nothing packed before it."""
    model = qwen(vocab_size=320)
    model.save_pretrained(tmp_path / "source")
    tokenizer().save_pretrained(tmp_path / "source")
    packed = pack_calibrated_folder(tmp_path / "source", tmp_path / "out", TEXT, method="gptq", progress=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in packed
    batches = text_batches(tokenizer(), TEXT, 512, 32)
    pack(model, calibration=calibrate(model, batches, progress=False), method="gptq", progress=False)
    other = load_checkpoint(qwen(vocab_size=320), tmp_path / "out")
    ids = torch.arange(12).view(2, 6)
    assert torch.equal(other(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match="model.safetensors is a file; expected a folder"):
        file = tmp_path / "out/model.safetensors"
        pack_calibrated_folder(tmp_path / "source", file, TEXT, method="gptq", progress=False)
    with pytest.raises(ValueError, match="is quantized already"):
        pack_calibrated_folder(tmp_path / "out", tmp_path / "again", TEXT, method="gptq", progress=False)


def test_a_model_of_transposed_weights_is_packed_with_a_calibration(tmp_path: pathlib.Path, capsys) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=2, n_head=2)).eval()
    model.save_pretrained(tmp_path / "source")
    tokenizer().save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"is a gpt2 model, .*pack the folder with a calibration"):
        pack_folder(tmp_path / "source", tmp_path / "out", progress=False)
    packed = pack_calibrated_folder(tmp_path / "source", tmp_path / "out", TEXT, method="rtn", length=32)
    assert len(packed) == 8 and "2/2" in capsys.readouterr().err
    pack(model, method="rtn", progress=False)
    other, ids = load_checkpoint(GPT2LMHeadModel(model.config).eval(), tmp_path / "out"), torch.arange(12).view(2, 6)
    assert torch.equal(other(ids).logits, model(ids).logits)
