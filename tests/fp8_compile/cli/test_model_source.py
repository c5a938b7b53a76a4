"""Models named on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8_compile
from fp8_compile.cli.model_source import load_factory, load_huggingface, parse_input

SOURCE = """
import torch
model = torch.nn.Linear(2, 3)
def with_args(): return model, torch.zeros(4, 2)
def with_kwargs(): return model, (), {"input": torch.zeros(4, 2)}
def broken(): raise KeyError("x")
def wrong(): return 3
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_of_mine.py").write_text(SOURCE)
    (tmp_path / "ends_itself.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("models_of_mine", None)


def test_a_factory_gives_a_model_alone_or_with_its_inputs(here: Path) -> None:
    model, args, kwargs = load_factory("models_of_mine:model")
    assert isinstance(model, nn.Linear) and args == () and kwargs == {}
    model, args, kwargs = load_factory("models_of_mine:with_args")
    assert [tuple(arg.shape) for arg in args] == [(4, 2)] and kwargs == {}
    model, args, kwargs = load_factory("models_of_mine:with_kwargs")
    assert args == () and list(kwargs) == ["input"]


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("models_of_mine", ValueError, "neither a folder nor MODULE:FACTORY"),
        ("models_of_mine.py:model", ValueError, "expected a module: models_of_mine:model"),
        ("not_there:make", ValueError, "cannot import 'not_there' from .*ModuleNotFoundError"),
        ("ends_itself:make", ValueError, "importing 'ends_itself' ended the program; put what it does"),
        ("models_of_mine:nothing", ValueError, "it has: model, with_args, with_kwargs, broken, wrong"),
        ("models_of_mine:broken", ValueError, r"broken\(\) failed: KeyError: 'x'"),
        ("models_of_mine:wrong", TypeError, "returned int; expected a model"),
    ],
)
def test_what_is_no_factory_is_an_error_with_a_remedy(
    here: Path, spec: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_factory(spec)


def test_inputs_are_read_and_wrong_ones_refused() -> None:
    made = parse_input("int64[2, 128]")
    assert made.dtype is torch.int64 and tuple(made.shape) == (2, 128)
    assert parse_input("bfloat16[]").dim() == 0
    for text in ("float8[2]", "float32", "float32[2,-1]", "float32[a]"):
        with pytest.raises(ValueError, match="expected DTYPE"):
            parse_input(text)


def test_a_hugging_face_folder_is_explained_without_weights_or_memory_for_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model, args, kwargs = load_huggingface(tmp_path, batch=1, tokens=32)
    assert all(parameter.is_meta for parameter in model.parameters())
    report = fp8_compile.explain(model, args, kwargs, fp8_compile.Config(target="cuda:90"))
    rewritten = {(row.module, row.gemm) for row in report.rewritten}
    assert ("model.layers.0.mlp.down_proj", "grad_weight") in rewritten and len(rewritten) == 7 * 3


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_without_a_config_is_an_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="is no Hugging Face folder: config.json"):
        load_huggingface(tmp_path, 1, 8)
