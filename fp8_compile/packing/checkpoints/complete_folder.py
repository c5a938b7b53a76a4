"""What servers and converters need of a model's folder beside its weights: a complete configuration, how text is
generated, and the tokenizer.

    config.json               the model's own, with "architectures" and "dtype", which save_pretrained fills in
    generation_config.json    where the model generates
    tokenizer.json, ...       what tokenizer.save_pretrained writes
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from torch import nn


def own_config(root: nn.Module) -> dict[str, Any]:
    """A model's configuration as ``save_pretrained`` would write it; empty where it has none."""
    config = getattr(root, "config", None)
    if config is None or not hasattr(config, "to_json_string"):
        return {}
    said = json.loads(config.to_json_string(use_diff=False))
    said["architectures"] = said.get("architectures") or [type(root).__name__]
    dtype = str(getattr(root, "dtype", "")).removeprefix("torch.")
    return said | ({"dtype": dtype} if dtype else {})


def check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise TypeError(
            "tokenizer: expected a tokenizer or processor of transformers, which has save_pretrained, got "
            f"{type(tokenizer).__name__}; load one with transformers.AutoTokenizer.from_pretrained"
        )


def write_other_files(root: nn.Module, folder: pathlib.Path, tokenizer: Any) -> None:
    """Write how text is generated, and the tokenizer where there is one."""
    generation = getattr(root, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
