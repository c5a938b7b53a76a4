"""Checkpoints that lost a part or were written by no one we know: an error that names layer and file, never codes that
are taken for weights."""

from __future__ import annotations

import json
import pathlib
from typing import Any, Callable

import pytest
import torch
from mixtures import qwen
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fp8_compile import load_checkpoint, pack, pack_folder, save_checkpoint
from fp8_compile.packing.checkpoints.files import INDEX

Tensors = dict[str, Tensor]
FORMATS = {"compressed-tensors": "nvfp4", "modelopt": "nvfp4", "fp8": "fp8"}
PARTS = {
    "compressed-tensors": ("weight_packed", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
    "fp8": ("weight", "weight_scale"),
}


def plain() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(32, 48), "norm": nn.LayerNorm(32), "b": nn.Linear(48, 32, bias=False)})


def saved(folder: pathlib.Path, layout: str, change: Callable[[Tensors], Any] = lambda tensors: None) -> pathlib.Path:
    """A checkpoint whose tensors were changed; its file."""
    model = plain()
    pack(model, FORMATS[layout], progress=False)
    save_checkpoint(model, folder, "compressed-tensors" if layout == "fp8" else layout)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("packed_already", [False, True])
@pytest.mark.parametrize("layout, part", [(layout, part) for layout, parts in PARTS.items() for part in parts])
def test_a_part_that_is_missing_is_an_error_that_names_layer_and_file_and_changes_nothing(
    layout: str, part: str, packed_already: bool, strict: bool, tmp_path: pathlib.Path
) -> None:
    file = saved(tmp_path, layout, lambda tensors: tensors.pop(f"a.{part}"))
    model = plain()
    if packed_already:
        pack(model, FORMATS[layout], progress=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError) as error:
        load_checkpoint(model, tmp_path, strict=strict)
    assert "a" in str(error.value).replace(":", " ").replace("'", " ").replace(".", " ").split(), error.value
    if (layout, part) != ("modelopt", "weight_scale_2"):  # which leaves what looks like FP8 with other codes
        assert str(file) in str(error.value) and part in str(error.value)
    after = model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name].float(), one.float()) for name, one in before.items())


def test_an_expert_that_lost_its_scale_is_an_error(tmp_path: pathlib.Path) -> None:
    model = qwen()
    pack(model, "fp8", progress=False)
    save_checkpoint(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = [name for name in tensors if ".experts.1." in name and name.endswith("weight_scale")]
    save_file({name: one for name, one in tensors.items() if name != lost[0]}, file)
    with pytest.raises(ValueError, match=rf"model.safetensors: {lost[0].removesuffix('_scale')} is stored as float8"):
        load_checkpoint(qwen(), tmp_path)
    save_file({name: one for name, one in tensors.items() if not name.endswith("weight_scale")}, file)
    with pytest.raises(ValueError, match="is stored as float8_e4m3fn codes, and no file of the checkpoint has"):
        load_checkpoint(qwen(), tmp_path)


CHANGES: dict[str, tuple[str, Callable[[Tensors], Any], str]] = {
    "a short bias": ("fp8", lambda t: t.update({"a.bias": torch.zeros(3)}), r"a.bias is stored as \[3\].* is \[48\]"),
    "a bias of bytes": ("fp8", lambda t: t.update({"a.bias": torch.zeros(48, dtype=torch.uint8)}), "a.bias is .*uint8"),
    "an FP8 norm": (
        "fp8", lambda t: t.update({"norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}), "norm.weight is .*float8"
    ),
    "an int32 norm": ("fp8", lambda t: t.update({"norm.weight": torch.ones(32).int()}), "norm.weight is .*int32 codes"),
    "one-dimensional FP8 codes": (
        "fp8", lambda t: t.update({"a.weight": t["a.weight"].flatten()}), r"a: expected FP8 .*\(1536,\)"
    ),
    "one FP8 code": (
        "fp8", lambda t: t.update({"a.weight": t["a.weight"][0, 0].clone()}), r"a: expected FP8 .*float8_e4m3fn \(\)"
    ),
    "scales of bytes": (
        "fp8", lambda t: t.update({"a.weight_scale": torch.ones(48, dtype=torch.uint8)}), "a: expected MXFP8, .*uint8"
    ),
    "a scale that is not a number": (
        "fp8", lambda t: t.update({"a.weight_scale": torch.full((48,), torch.nan)}), "a: its weight_scale .* not finite"
    ),
    "one-dimensional NVFP4 codes": (
        "modelopt", lambda t: t.update({"a.weight": t["a.weight"].flatten()}), r"a: expected NVFP4 .*\(768,\)"
    ),
    "a global scale of zero": (
        "compressed-tensors", lambda t: t.update({"a.weight_global_scale": torch.zeros(1)}), "a: .*global scale above 0"
    ),
    "two global scales": (
        "modelopt", lambda t: t.update({"a.weight_scale_2": torch.ones(2)}), r"a: expected NVFP4 .*one global .*\(2,\)"
    ),
    "a packed norm": (
        "fp8", lambda t: t.update({"norm.weight_scale": torch.ones(1), "norm.weight": t["a.weight"].clone()}),
        "packs norm, which is LayerNorm in the model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", CHANGES)
def test_tensors_that_do_not_fit_are_value_errors_and_change_nothing(which: str, tmp_path: pathlib.Path) -> None:
    layout, change, message = CHANGES[which]
    saved(tmp_path, layout, change)
    model = plain()
    with pytest.raises(ValueError, match=message):
        load_checkpoint(model, tmp_path)
    assert type(model["a"]) is type(model["b"]) is nn.Linear


def test_an_input_scale_of_several_numbers_is_refused_where_it_would_be_used(tmp_path: pathlib.Path) -> None:
    saved(tmp_path, "fp8", lambda tensors: tensors.update({"a.input_scale": torch.ones(3)}))
    load_checkpoint(plain(), tmp_path)
    with pytest.raises(ValueError, match=r"a: expected one finite number above 0 as input_scale, got .* \(3,\)"):
        load_checkpoint(plain(), tmp_path, activations="fp8")


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "C:\\x", "a\0b"])
def test_an_index_that_names_files_elsewhere_is_refused(name: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "in"
    file = saved(folder, "fp8")
    save_file(load_file(file), tmp_path / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a.weight": name}}))
    (folder / "config.json").write_text("{}")
    for read in (lambda: load_checkpoint(plain(), folder), lambda: pack_folder(folder, tmp_path / "out")):
        with pytest.raises(ValueError, match="expected names of files beside it, without folders"):
            read()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("[" * 200_000, "nested more than 64 deep"),
        ("{", "is not JSON"),
        ("[]", "holds list; expected an object"),
        ('{"weight_map": ["model.safetensors"]}', "expected weight_map to be an object"),
        ('{"weight_map": {"a.weight": 3}}', "expected weight_map to be an object"),
        ('{"weight_map": {"attic.weight": "model.safetensors"}}', "model.safetensors has no attic.weight"),
    ],
)
def test_an_index_that_is_damaged_is_an_error_that_names_it(text: str, message: str, tmp_path: pathlib.Path) -> None:
    saved(tmp_path, "fp8")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(plain(), tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_folder_is_not_packed_where_its_config_or_dtypes_are_unknown(tmp_path: pathlib.Path) -> None:
    save_file({"a.weight": torch.ones(32, 32), "b": torch.ones(2, dtype=torch.uint16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json holds list"):
        pack_folder(tmp_path, tmp_path / "out", progress=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="model.safetensors: b is of dtype U16; expected one of"):
        pack_folder(tmp_path, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
