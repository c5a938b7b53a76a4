"""fp8-compile pack --calibration, eval and generate, on a model that has learned a text by heart."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
import torch
from speaker import TEXT, speaker, spoken, tokenizer
from transformers import AutoModelForCausalLM

import fp8_compile
from fp8_compile import load_checkpoint
from fp8_compile.cli.command import main
from fp8_compile.packing.checkpoints import calibrated_folder
from fp8_compile.packing.checkpoints.folder import PROGRESS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("source")
    speaker().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "texts.txt").write_text(TEXT)
    return folder


def run(*arguments: object) -> int:
    return main([str(one) for one in arguments])


@pytest.fixture(scope="module")
def packed(source: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    target = tmp_path_factory.mktemp("packed")
    texts = source / "texts.txt"
    assert run("pack", source, target, "--method", "gptq", "--calibration", texts, "--tokens", 16, "--quiet") == 0
    return target


def test_gptq_from_the_shell_writes_a_whole_folder_that_speaks(packed, capsys) -> None:
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= {file.name for file in packed.iterdir()}
    assert not (packed / PROGRESS).exists() and not (packed / "packing").exists()
    assert run("generate", packed, TEXT[:9], "--tokens", 40) == 0
    assert capsys.readouterr().out.splitlines()[0] == TEXT
    assert TEXT[:9] + spoken(load_checkpoint(speaker(steps=0), packed), TEXT[:9]) == TEXT


def test_eval_says_what_packing_did(source, packed, tmp_path, capsys) -> None:
    texts = source / "texts.txt"
    assert run("eval", packed, "--against", source, "--texts", texts, "--json", tmp_path / "figures.json") == 0
    said = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    ids = tokenizer()(TEXT, return_tensors="pt")["input_ids"]
    model, other = AutoModelForCausalLM.from_pretrained(source), load_checkpoint(speaker(steps=0), packed)
    with torch.no_grad():
        losses = [float(one(ids, labels=ids).loss.exp()) for one in (model, other)]
        p, q = (one(ids).logits[:, :-1].log_softmax(-1) for one in (model, other))
    assert [figures["before"], figures["perplexity"]] == pytest.approx(losses, rel=1e-5)
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
    assert figures["divergence"] == pytest.approx(float(kl), rel=1e-3)
    assert len(figures["layers"]) == 14 and 0 < max(figures["layers"].values()) < 0.2
    assert re.search(r"perplexity 1\.\d+ -> 1\.\d+ over \d+ tokens", said) and "same likeliest token 100.0%" in said
    assert run("eval", source, "--texts", texts) == 0
    assert f"perplexity {losses[0]:.4f}" in capsys.readouterr().out


def test_gptq_is_nearer_than_rounding(source, packed, tmp_path) -> None:
    texts, figures = source / "texts.txt", {}
    assert run("pack", source, tmp_path / "rtn", "--method", "rtn", "--quiet") == 0
    for name, folder in (("gptq", packed), ("rtn", tmp_path / "rtn")):
        run("eval", folder, "--against", source, "--texts", texts, "--json", tmp_path / "figures.json")
        layers = json.loads((tmp_path / "figures.json").read_text())["layers"]
        figures[name] = sum(layers.values()) / len(layers)
    assert figures["gptq"] < figures["rtn"]


def test_a_calibrated_run_that_was_cut_short_goes_on(source, packed, tmp_path, monkeypatch) -> None:
    command = ("pack", source, tmp_path / "cut", "--method", "gptq", "--calibration", source / "texts.txt")
    command = (*command, "--tokens", 16, "--quiet")
    real, calls = calibrated_folder.calibrate, []

    def fails(model: torch.nn.Module, *args: object, layers: list[str], **options: object) -> object:
        calls.append(layers[0])
        if len(calls) == 2:
            raise OSError("cut short")
        return real(model, *args, layers=layers, **options)

    monkeypatch.setattr(calibrated_folder, "calibrate", fails)
    assert run(*command) == 2 and not (tmp_path / "cut/config.json").exists()
    assert run(*command) == 0
    assert [name.split(".")[2] for name in calls] == ["0", "1", "1"]  # the first block was there
    assert (tmp_path / "cut/model.safetensors").read_bytes() == (packed / "model.safetensors").read_bytes()


def test_a_run_without_calibration_goes_on_with_the_files_that_are_left(source, tmp_path, monkeypatch) -> None:
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    wanted = tmp_path / "wanted"
    fp8_compile.pack_folder(tmp_path / "shards", wanted, method="rtn", progress=False)
    files = sorted(file.name for file in wanted.glob("*.safetensors"))
    again = tmp_path / "again"
    fp8_compile.pack_folder(tmp_path / "shards", again, method="rtn", progress=False)
    from fp8_compile.packing.checkpoints import folder

    begun = folder._finish
    monkeypatch.setattr(folder, "_finish", lambda *_: (_ for _ in ()).throw(OSError("cut short")))
    with pytest.raises(OSError, match="cut short"):
        fp8_compile.pack_folder(tmp_path / "shards", again, method="rtn", progress=False)
    monkeypatch.setattr(folder, "_finish", begun)
    (again / files[1]).unlink()
    kept = (again / files[0]).stat().st_mtime_ns
    fp8_compile.pack_folder(tmp_path / "shards", again, method="rtn", progress=False)
    assert (again / files[0]).stat().st_mtime_ns == kept
    assert all((again / name).read_bytes() == (wanted / name).read_bytes() for name in files)
    fp8_compile.pack_folder(tmp_path / "shards", again, method="sweep", progress=False)  # from the start
    assert any((again / name).read_bytes() != (wanted / name).read_bytes() for name in files)


@pytest.mark.parametrize("options", [("fp8",), ("fp8_blocks",), ("fp8", "--activations", "fp8", "--calibration")])
def test_fp8_from_the_shell(options, source, tmp_path, capsys) -> None:
    texts = (source / "texts.txt",) if "--calibration" in options else ()
    assert run("pack", source, tmp_path, "--quiet", "--format", *options, *texts) == 0
    group = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert group["weights"]["num_bits"] == 8
    if texts:
        assert group["input_activations"]["dynamic"] is False
    assert run("generate", tmp_path, TEXT[:9], "--tokens", 40) == 0
    assert TEXT in capsys.readouterr().out


def test_mistakes_are_one_line(source, tmp_path, capsys) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    texts = source / "texts.txt"
    for arguments, message in (
        (("generate", tmp_path, "x"), "has no config.json"),
        (("generate", source, "x", "--tokens", 0), "expected at least 1"),
        (("eval", source, "--texts", empty), "expected a file with some text"),
        (("eval", source, "--texts", tmp_path / "none.txt"), "none.txt"),
        (("pack", source, tmp_path / "x", "--activations", "fp8", "--format", "fp8"), "add --calibration"),
        (("pack", source, tmp_path / "x", "--format", "int3"), "format='int3' is unknown"),
        (("pack", source, tmp_path / "x", "--method", "gptq"), "without the model's activations"),
        (("pack", source, tmp_path / "x", "--format", "fp8", "--calibration", texts), "activations=None"),
    ):
        assert run(*arguments) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
