"""A small model that has learned a text by heart, with a tokenizer of its own: what it says is known and certain."""

from __future__ import annotations

import functools
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

TEXT = "The quick brown fox jumps over the lazy dog, and 12 small birds sing about it until the sun goes down again."
END = "<|end|>"


@functools.cache
def tokenizer(split: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE, which splits words as GPT-2 does, or by a regular expression."""
    made = Tokenizer(models.BPE(ignore_merges=split is not None and "{1,3}" in split))  # as Llama 3's
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        steps = [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": 320, "special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator([TEXT] * 2, trainers.BpeTrainer(**options))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def speaker(kind: str = "llama", steps: int = 80, split: str | None = None, **options: Any) -> PreTrainedModel:
    """A model, of transformers' type ``kind``, that goes on with ``TEXT``."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320}
    end = tokenizer(split).eos_token_id
    special = {"bos_token_id": None, "eos_token_id": end, "pad_token_id": end}
    ids = torch.tensor([[*tokenizer(split)(TEXT)["input_ids"], end]])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **heads, **special, **options}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model loses more by waiting for others than it gains
    for _ in range(steps):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_num_threads(threads)
    return model.eval().requires_grad_(False)


def spoken(model: torch.nn.Module, prompt: str, split: str | None = None) -> str:
    """What the model goes on with, by its likeliest tokens."""
    ids = tokenizer(split)(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    return tokenizer(split).decode(out[0, ids.shape[1] :], skip_special_tokens=True)
