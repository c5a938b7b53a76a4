"""Pack a Hugging Face folder shard by shard, one layer in memory at a time.

    src/model-00001-of-00002.safetensors, ...  ->  dst/ the same names, weights in NVFP4; config.json with how

Weights are known by their names and shapes: matrices called ``*.weight``, except embeddings, norms and routers. Files
get their names when they are whole, and config.json comes last, so that a run cut short leaves nothing that looks
complete. The next run with the same arguments goes on with the files that are not there yet. Without the model there
are no activations to weigh errors by: the methods are those that need none (``calibrated_folder.py`` has the others).
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
from typing import Any, Mapping, Sequence

import torch
from tqdm import tqdm

from fp8_compile.json_files import read_json
from fp8_compile.kernels.nvfp4.quantize import METHODS
from fp8_compile.packing.formats import FORMATS, NVFP4, Format
from fp8_compile.selection import Selection
from fp8_compile.whole_files import whole_file, write_json

from .experts import module_of_expert
from .files import INDEX, open_tensors, remove_others, shard_files
from .layouts import Described, Layout
from .quantization_config import Group, quantization_config
from .safetensors_writer import DTYPES, SafetensorsWriter
from .stored_model import STACK_INPUTS, check_stack

PROGRESS = "packing.json"  # in a folder that is being written: what for
# Parts of a name that say that a matrix is looked up in, or too small and too important to round.
NOT_LINEAR = ("embed", "wte", "wpe", "norm", "router", "relative_attention_bias")
NOT_LINEAR_NAMES = ("gate", "shared", "shared_expert_gate", "ln_f")
TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp")  # models of transformers' Conv1D
EXPERT = re.compile(r"[.]experts[.][0-9]+[.]")
TORCH = {name: dtype for dtype, name in DTYPES.items()}


def pack_folder(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    format: str = "nvfp4",
    method: str | None = None,
    layout: str = "compressed-tensors",
    exclude: Sequence[str] = (),
    include: Sequence[str] = ("*",),
    progress: bool = True,
) -> list[str]:
    """Write a packed copy of ``src`` to ``dst`` and return the names of the layers that were packed. ``method`` is by
    default "sweep" for NVFP4, and the only one of the FP8 formats."""
    source, target = pathlib.Path(src), pathlib.Path(dst)
    kind = check_format(format)
    check_folders(source, target)
    model_type = _config(source).get("model_type")
    if model_type in TRANSPOSED:
        raise ValueError(
            f"{source} is a {model_type} model, whose weights are stored [K, N]; load the model, fp8_compile.pack it "
            "and save_checkpoint, or pack the folder with a calibration"
        )
    method = method or kind.method(None, False)
    _check(kind, method, layout)
    stored = kind.layout(layout, str(source))
    files = shard_files(source)
    shapes, where = _tensors_of(files)
    chosen = _choose(shapes, Selection(tuple(include), tuple(exclude)), kind)
    groups = _groups(kind, stored, chosen)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").unlink(missing_ok=True)  # until the end the folder is not a checkpoint
    asked = [format, method, layout, list(include), list(exclude)]
    done = begin_or_resume(target, files, asked, [target / file.name for file in files])
    shared = kind.shared_scales(chosen, lambda layer: _weight(where, layer), method)
    weight_map: dict[str, str] = {}
    size = 0
    with tqdm(total=len(shapes), desc="pack", unit="tensor", disable=not progress) as bar:
        for file in files:
            described = _described(file, chosen, stored)
            weight_map.update(dict.fromkeys(described, file.name))
            size += sum(dtype.itemsize * int(torch.Size(shape).numel()) for dtype, shape in described.values())
            if file.name in done:
                bar.update(sum(one == file for one in where.values()))
                continue
            with whole_file(target / file.name) as out, open_tensors(file) as tensors:
                writer = SafetensorsWriter(out, described)
                for key in tensors.keys():  # noqa: SIM118
                    layer = key.removesuffix(".weight")
                    if layer in chosen and key.endswith(".weight"):
                        plain = tensors.get_tensor(key)
                        weight = kind.quantize(plain, method, None, name=layer, shared=shared.get(layer))
                        for name, part in stored.tensors(layer, weight).items():
                            writer.write(name, part)
                    else:
                        writer.write(key, tensors.get_tensor(key))
                    bar.update()
                writer.close()
    if len(files) > 1:
        write_json(target / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    remove_others(target, {*weight_map.values(), *([INDEX] if len(files) > 1 else [])})
    _finish(source, target, groups, shapes, chosen)
    return list(chosen)


def begin_or_resume(
    target: pathlib.Path, files: Sequence[pathlib.Path], asked: Any, made: Sequence[pathlib.Path]
) -> set[str]:
    """The names of those files that an earlier run with the same arguments has made of ``files``, the source's, and
    finished. Those of another run are removed."""
    said = {"asked": asked, "files": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}}
    said = json.loads(json.dumps(said))
    progress = target / PROGRESS
    if progress.exists() and read_json(progress, f"Remove {progress}, and pack again") == said:
        return {file.name for file in made if file.exists()}
    for file in made:
        file.unlink(missing_ok=True)
    write_json(progress, said)
    return set()


def check_format(format: str) -> Format[Any]:
    if format not in FORMATS:
        raise ValueError(f"format={format!r} is unknown; expected one of: {', '.join(FORMATS)}")
    return FORMATS[format]


def _groups(kind: Format[Any], layout: Layout[Any], chosen: Mapping[str, Any]) -> list[Group]:
    """The layers and, apart from them, the experts, as the configuration describes them."""
    experts = [layer for layer in chosen if EXPERT.search(layer)]
    inputs = STACK_INPUTS.get(kind.name)
    if experts and kind.name in STACK_INPUTS and layout.name == "modelopt":
        check_stack(experts[0], kind, layout.name)
    if not experts or inputs is None:
        return [Group(layout, None, list(chosen))]
    plain = [layer for layer in chosen if not EXPERT.search(layer)]
    mixtures = Group(layout, inputs, [], list(dict.fromkeys(map(module_of_expert, experts))))
    return [*([Group(layout, None, plain)] if plain else []), mixtures]


def _check(kind: Format[Any], method: str, layout: str) -> None:
    layouts = list(dict.fromkeys(one.name for one in kind.layouts))
    if layout not in layouts:
        raise ValueError(f"layout={layout!r}; expected one of: {', '.join(layouts)}")
    possible = [one for one in METHODS if not kind.needs_hessian(one)] if kind is NVFP4 else ["rtn"]
    if method not in possible:
        raise ValueError(f"method={method!r}; without the model's activations, expected one of: {', '.join(possible)}")


def check_folders(source: pathlib.Path, target: pathlib.Path) -> None:
    """Raise unless ``source`` is a plain model that can be read and ``target`` is another folder."""
    if not (source / "config.json").exists():
        raise ValueError(f"{source} has no config.json; expected the folder of a Hugging Face model")
    if source.resolve() == target.resolve():
        raise ValueError(f"{target} is the folder that is read; choose another one to write to")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; expected a folder to write to, or a name that is free")
    if "quantization_config" in _config(source):
        raise ValueError(f"{source} is quantized already; start from the original weights")


def _config(source: pathlib.Path) -> dict[str, Any]:
    return read_json(source / "config.json", "Expected the config.json of a Hugging Face model")


def _tensors_of(
    files: Sequence[pathlib.Path],
) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, pathlib.Path]]:
    """Dtype and shape of every tensor, and the file it is in, from the headers alone."""
    shapes, where = {}, {}
    for file in files:
        with open_tensors(file) as tensors:
            for key in tensors.keys():  # noqa: SIM118
                one = tensors.get_slice(key)
                if one.get_dtype() not in TORCH:
                    raise ValueError(
                        f"{file}: {key} is of dtype {one.get_dtype()}; expected one of: {', '.join(TORCH)}. Take the "
                        "original weights"
                    )
                shapes[key], where[key] = (one.get_dtype(), tuple(one.get_shape())), file
    return shapes, where


def _choose(
    shapes: dict[str, tuple[str, tuple[int, ...]]], selection: Selection, kind: Format[Any]
) -> dict[str, tuple[int, ...]]:
    known = {part for key in shapes for part in _ancestors(key)}
    selection.check(sorted(known))
    chosen: dict[str, tuple[int, ...]] = {}
    for key, (dtype, shape) in shapes.items():
        layer = key.removesuffix(".weight")
        if not key.endswith(".weight") or len(shape) != 2 or dtype not in ("F32", "F16", "BF16"):
            continue
        if kind is NVFP4 and shape[1] % 16:
            continue
        if _is_linear(layer) and selection.reason_against(layer, (key,)) is None:
            chosen[layer] = shape
    if not chosen:
        raise ValueError("no weight to pack: expected matrices called *.weight with K a multiple of 16; see exclude")
    return chosen


def _is_linear(layer: str) -> bool:
    return layer.rpartition(".")[2] not in NOT_LINEAR_NAMES and not re.search("|".join(NOT_LINEAR), layer.lower())


def _ancestors(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _weight(where: dict[str, pathlib.Path], layer: str) -> torch.Tensor:
    with open_tensors(where[f"{layer}.weight"]) as tensors:
        return tensors.get_tensor(f"{layer}.weight")


def _described(file: pathlib.Path, chosen: dict[str, tuple[int, ...]], layout: Layout[Any]) -> Described:
    described: Described = {}
    with open_tensors(file) as tensors:
        for key in tensors.keys():  # noqa: SIM118
            layer = key.removesuffix(".weight")
            if layer in chosen and key.endswith(".weight"):
                described |= layout.described(layer, chosen[layer])
            else:
                one = tensors.get_slice(key)
                described[key] = TORCH[one.get_dtype()], tuple(one.get_shape())
    return described


def _finish(
    source: pathlib.Path,
    target: pathlib.Path,
    groups: Sequence[Group],
    shapes: dict[str, Any],
    chosen: dict[str, tuple[int, ...]],
) -> None:
    """Copy all files but the weights, and write the configuration, which says how the weights are stored."""
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".gguf", ".h5", ".onnx") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            with whole_file(target / file.name) as out, open(file, "rb") as given:
                shutil.copyfileobj(given, out)
    # Embeddings too, which does no harm: no name tells them from layers such as ALBERT's embedding_hidden_mapping_in. A
    # head that is tied to one is not in the files, but it is a linear layer of the model.
    matrices = [key for key, (_, shape) in shapes.items() if key.endswith(".weight") and len(shape) == 2]
    linear = dict.fromkeys([*(key.removesuffix(".weight") for key in matrices), "lm_head"])
    ignore = [layer for layer in linear if layer not in chosen]
    config = _config(source)
    config["quantization_config"], files = quantization_config(groups, ignore)
    for name, data in files.items():
        write_json(target / name, data)
    (target / PROGRESS).unlink(missing_ok=True)
    write_json(target / "config.json", config)
