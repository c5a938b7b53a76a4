"""``fp8-compile export``: what it hands on, and mistakes. That packages work is ``test_export.py``'s."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import fp8_compile
from fp8_compile.cli.command import MISTAKE, main
from fp8_compile.cli.verbs import export
from fp8_compile.packing.formats import FORMATS
from fp8_compile.report import Report

FACTORY = """
import torch
def make():
    return torch.nn.Linear(32, 16), (torch.zeros(4, 32),)
def batches():
    yield from (torch.full((2, 32), 3.0), torch.full((5, 32), -7.0))
one = torch.zeros(2, 32)
def function():
    return (lambda x: x), (one,)
"""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []

    def export(model: Any, args: Any, path: Path, **options: Any) -> Report:
        seen.append((model.training, path.name, options))
        path.write_bytes(bytes(2_000_000))
        return Report((), "packed", "cpu")

    (tmp_path / "made_for_export.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fp8_compile, "export", export)
    return seen


def test_options_go_to_export(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dynamic", "input:0", "--exclude", "head", "--method", "rtn"]
    assert main(["export", "made_for_export:make", "model.pt2", *words]) == 0
    wanted = {"kwargs": {}, "weights": "nvfp4", "dynamic_shapes": {"input": {0: Dim.DYNAMIC}}}
    assert calls == [(False, "model.pt2", {**wanted, "method": "rtn", "exclude": ["head"]})]
    assert "model.pt2: 2.0 MB" in capsys.readouterr().out


def test_an_unknown_input_is_a_mistake_that_names_those_there_are(calls: list[Any], capsys: Any) -> None:
    assert main(["export", "made_for_export:make", "model.pt2", "--dynamic", "x:0"]) == MISTAKE
    assert "expected NAME:DIMS such as input:0,1, for one of the inputs input" in capsys.readouterr().err
    assert calls == []


def test_batches_are_calibrated_with_and_other_things_refused(calls: list[Any], capsys: Any) -> None:
    words = ["--weights", "fp8", "--activations", "fp8", "--dump", "graphs", "--calibration"]
    assert main(["export", "made_for_export:make", "model.pt2", *words, "made_for_export:batches"]) == 0
    ((_, _, options),) = calls
    assert (options["weights"], options["activations"], options["dump"]) == ("fp8", "fp8", Path("graphs"))
    assert options["calibration"].amax("") == 7 and options["calibration"].tokens("") == 7
    assert main(["export", "made_for_export:make", "model.pt2", *words, "made_for_export:one"]) == MISTAKE
    assert "made_for_export:one gives Tensor; expected an iterable of batches" in capsys.readouterr().err


@pytest.mark.parametrize("packed", [False, True])
def test_a_hugging_face_folder_is_exported_with_its_weights(
    packed: bool, calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=False)).eval()
    if packed:
        fp8_compile.pack(model, progress=False)
        model.config.architectures = ["LlamaForCausalLM"]
        fp8_compile.save_checkpoint(model, tmp_path / "folder")
    else:
        model.save_pretrained(tmp_path / "folder")
    exported = []
    stand_in = fp8_compile.export

    def export(given: Any, *args: Any, **options: Any) -> Report:
        exported.append(given)
        return stand_in(given, *args, **options)

    monkeypatch.setattr(fp8_compile, "export", export)
    words = ["--weights", "none"] if packed else []
    assert main(["export", "folder", "model.pt2", "--tokens", "6", "--dynamic", "input_ids:0", *words]) == 0
    ((training, _, options),) = calls
    ids = options["kwargs"].pop("input_ids")
    assert not training and ids.shape == (1, 6) and options["kwargs"] == {"use_cache": False, "return_dict": False}
    assert options["dynamic_shapes"]["input_ids"] == {0: Dim.DYNAMIC}
    torch.testing.assert_close(exported[0](ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
    (tmp_path / "folder" / "model.safetensors").write_bytes(b"cut sh")
    assert main(["export", "folder", "model.pt2"]) == MISTAKE
    assert "folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["export", "empty", "model.pt2"]) == MISTAKE
    assert "empty is no Hugging Face folder: config.json" in capsys.readouterr().err


def test_what_torch_can_not_export_is_a_mistake_in_one_line(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(*args: Any, **options: Any) -> Report:
        raise RuntimeError("Could not guard on data-dependent expression\n\nand pages of where")

    assert main(["export", "made_for_export:function", "model.pt2"]) == MISTAKE
    assert "made_for_export:function gives function; expected a torch.nn.Module" in capsys.readouterr().err
    monkeypatch.setattr(fp8_compile, "export", export)
    assert main(["export", "made_for_export:make", "model.pt2"]) == MISTAKE
    (line,) = capsys.readouterr().err.splitlines()
    assert "made_for_export:make can't be exported: Could not guard on data-dependent expression (--tr" in line


def test_the_verb_offers_every_format() -> None:
    parser = argparse.ArgumentParser()
    export.add_arguments(parser)
    for format in (*FORMATS, "none"):
        assert parser.parse_args(["model", "a.pt2", "--weights", format]).weights == format
    assert f"{{{','.join(FORMATS)},none}}" in parser.format_help(), "and no other"
