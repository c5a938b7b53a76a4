"""Language models in Hugging Face folders, packed or not, with their tokenizers, for verbs that run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load_tokenizer(folder: Path) -> Any:
    transformers = _transformers(folder)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise ValueError(
            f"{folder} has no tokenizer that transformers reads ({_line(error)}); expected a complete folder, as "
            "fp8-compile pack or save_checkpoint(..., tokenizer=...) writes it"
        ) from error


def load_language_model(folder: Path) -> Any:
    """The model in its own dtype; a packed one with our packed layers."""
    transformers = _transformers(folder)
    options: dict[str, Any] = {"dtype": "auto"}
    if "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        from fp8_compile import PackConfig

        options["quantization_config"] = PackConfig()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"transformers can't load {folder} as a language model: {_line(error)}") from error


def _transformers(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; expected the folder of a Hugging Face model")
    try:
        import transformers
    except ImportError as error:
        raise ValueError("a Hugging Face folder needs the transformers package: pip install transformers") from error
    return transformers


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
