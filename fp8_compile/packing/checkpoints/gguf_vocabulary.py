"""The vocabulary of a GGUF file: tokens, merges, special tokens and the chat template of a tokenizer.

llama.cpp has its own code for how a text is split before merges apply, and a file names it. Byte-level BPE with the
splits in ``SPLITS`` is written here; other tokenizers are for llama.cpp's converter, which knows many more.
"""

from __future__ import annotations

import json
import tempfile
from typing import Any

CONVERTER = (
    'save_checkpoint(model, "out", tokenizer=tokenizer) and let llama.cpp\'s converter make the file: '
    "python convert_hf_to_gguf.py out --outfile model.gguf"
)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = ""  # what a ByteLevel pre-tokenizer splits by itself
SPLITS = {GPT2: "gpt-2", _WORDS % r"\p{N}{1,3}": "llama-bpe", _WORDS % r"\p{N}": "qwen2"}


def add_vocabulary(gguf: Any, writer: Any, tokenizer: Any, size: int) -> None:
    """Write a tokenizer's vocabulary; ``size`` is the model's, and ids that the tokenizer lacks are unused."""
    described = _described(tokenizer)
    known = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(known) >= size:
        raise ValueError(f"tokenizer: it has the token {max(known)}, and the model has {size}; pass the model's own")
    kinds = gguf.TokenType
    added = {one["id"]: kinds.CONTROL if one["special"] else kinds.USER_DEFINED for one in described["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(described))
    writer.add_token_list([known.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([added.get(n, kinds.NORMAL if n in known else kinds.UNUSED) for n in range(size)])
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=size)
    # Templates are told apart by what they do to a text.
    ids = tokenizer("a")["input_ids"]
    special.add_special_token = {
        "bos": bool(ids) and ids[0] == tokenizer.bos_token_id,
        "eos": bool(ids) and ids[-1] == tokenizer.eos_token_id,
    }
    special.add_to_gguf(writer, quiet=True)


def check_vocabulary(tokenizer: Any) -> None:
    """Raise a ValueError unless ``add_vocabulary`` can write the tokenizer."""
    if tokenizer is None:
        raise ValueError(
            "layout='gguf' needs the tokenizer, or llama.cpp aborts at the first completion; expected "
            "save_checkpoint(..., tokenizer=...)"
        )
    _split(_described(tokenizer))


def _described(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"tokenizer: layout='gguf' writes those of the tokenizers package, got {type(tokenizer).__name__}; "
            f"{CONVERTER}"
        )
    return json.loads(backend.to_str())


def _split(described: dict[str, Any]) -> str:
    """llama.cpp's name for how a text is split into words."""
    model, normalizer = described["model"], described["normalizer"]
    before = described["pre_tokenizer"] or {}
    steps = before.get("pretokenizers", [before])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    levels = [step for step in steps if step.get("type") == "ByteLevel" and not step.get("add_prefix_space")]
    if levels and levels[0]["use_regex"]:
        patterns.append(GPT2)
    whole = model["type"] == "BPE" and len(steps) == len(patterns) + len(levels) - (GPT2 in patterns)
    if not whole or len(levels) != 1 or len(patterns) != 1 or patterns[0] not in SPLITS:
        raise ValueError(
            "tokenizer: layout='gguf' writes byte-level BPE as GPT-2, Llama 3 and Qwen have it, and this one is "
            f"{model['type']} with another way to split texts; {CONVERTER}"
        )
    if normalizer not in (None, {"type": "NFC"}):
        raise ValueError(f"tokenizer: its normalizer {normalizer['type']} has no place in layout='gguf'; {CONVERTER}")
    name = SPLITS[patterns[0]]
    if bool(model.get("ignore_merges")) != (name == "llama-bpe"):  # llama.cpp decides this by the name
        raise ValueError(
            f"tokenizer: ignore_merges={bool(model.get('ignore_merges'))} is not what llama.cpp does for {name}; "
            f"{CONVERTER}"
        )
    return name
