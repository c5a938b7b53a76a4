"""The files of a checkpoint: which there are, what is in them, and what of an earlier one has to go."""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any, Collection, Iterator

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8_compile.json_files import read_json

INDEX = "model.safetensors.index.json"
AGAIN = "Copy the checkpoint again, or save it again"


def read_tensors(folder: pathlib.Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    return read_with_files(folder)[0]


def read_with_files(folder: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, pathlib.Path]]:
    """All tensors of a folder's safetensors files, and the file that each is in."""
    tensors: dict[str, Tensor] = {}
    where: dict[str, pathlib.Path] = {}
    for file in shard_files(folder):
        with open_tensors(file) as opened:
            for name in opened.keys():  # noqa: SIM118
                tensors[name], where[name] = opened.get_tensor(name), file
    for name, shard in _index(folder).items():
        if name not in tensors:
            raise ValueError(f"{folder / shard} has no {name}, which {INDEX} says it has. {AGAIN}")
    return tensors, where


@contextlib.contextmanager
def open_tensors(file: pathlib.Path) -> Iterator[Any]:
    """A safetensors file, to be read tensor by tensor."""
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file} is not whole, or no safetensors file: {error}; expected a whole checkpoint") from None


def shard_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a checkpoint, as its index lists them; one that is missing is an error."""
    if (folder / INDEX).exists():
        names = sorted(set(_index(folder).values()))
    elif (folder / "model.safetensors").exists():
        names = ["model.safetensors"]  # beside it may be an adapter, or the same weights under other names
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        raise ValueError(f"{folder} has no {', '.join(missing) or 'safetensors files'}; expected a whole checkpoint")
    return [folder / name for name in names]


def _index(folder: pathlib.Path) -> dict[str, str]:
    """Which file each tensor is in, by the index; nothing where there is none."""
    path = folder / INDEX
    if not path.exists():
        return {}
    stored = read_json(path, AGAIN).get("weight_map", {})
    if not isinstance(stored, dict) or not all(isinstance(file, str) for file in stored.values()):
        raise ValueError(f"{path}: expected weight_map to be an object of names of files. {AGAIN}")
    for file in set(stored.values()):
        # One path more than a name would read files outside of the folder, and pack_folder write there.
        if file in ("", ".", "..") or any(mark in file for mark in "/\\\0:"):
            raise ValueError(f"{path} names the file {file!r}; expected names of files beside it, without folders")
    return stored


def remove_others(folder: pathlib.Path, written: Collection[str]) -> None:
    """Remove what is left of an earlier checkpoint, once another one's weights are there: it would be read with or
    instead of them."""
    shards = (file.name for file in folder.glob("model-?????-of-?????.safetensors"))
    for name in {INDEX, "hf_quant_config.json", "model.safetensors", *shards} - set(written):
        (folder / name).unlink(missing_ok=True)
