"""Pack a Hugging Face folder by what its layers' inputs are on some texts: GPTQ, or static scales of FP8 inputs.

The model is loaded, and its blocks are packed in the order in which they run, each by the inputs that the packed blocks
before it give. Statistics are kept for one block at a time. What a block has become is written at once, and a run that
is cut short goes on with the next block when it is started again.

    dst/packing/00000.safetensors, ...     one file per block that is done, until the checkpoint is whole
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
from typing import Any, Iterable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fp8_compile.packing.calibrate import calibrate
from fp8_compile.packing.choose import choose_weights
from fp8_compile.packing.pack import pack, settings_of

from .files import open_tensors
from .folder import PROGRESS, begin_or_resume, check_folders, check_format
from .safetensors_writer import write_safetensors
from .save_and_load import place_packed, save_checkpoint, stored_as
from .stored_names import StoredNames

BLOCK = re.compile(r"(.*?[.][0-9]+)[.]")
PARTS = "packing"


def text_batches(tokenizer: Any, text: str, length: int, count: int) -> list[Tensor]:
    """Up to ``count`` rows of ``length`` tokens of a text, one per batch; of a shorter text all that there is."""
    if length < 2 or count < 1:
        raise ValueError(f"expected rows of at least 2 tokens and at least 1 row, got {length} and {count}")
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    if len(ids) < 2:
        raise ValueError(f"the texts have {len(ids)} tokens; expected a file with some text")
    rows = ids[: len(ids) // length * length].view(1, -1, length) if len(ids) >= length else ids.view(1, 1, -1)
    return list(rows.unbind(1))[:count]


def pack_calibrated_folder(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    text: str,
    *,
    format: str = "nvfp4",
    method: str | None = None,
    activations: str | None = None,
    layout: str = "compressed-tensors",
    exclude: Sequence[str] = (),
    include: Sequence[str] = ("*",),
    length: int = 512,
    count: int = 32,
    progress: bool = True,
) -> list[str]:
    """Write a packed copy of the language model in ``src`` to ``dst``; the result is the names of what was packed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, target = pathlib.Path(src), pathlib.Path(dst)
    kind = check_format(format)
    check_folders(source, target)
    kind.layout(layout, str(source))
    settings_of(format, method, activations, True, 16, {})
    tokenizer = AutoTokenizer.from_pretrained(source)
    batches = text_batches(tokenizer, text, length, count)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    layers, stacks, _ = choose_weights(model, include, exclude)
    blocks = by_block([*layers, *stacks])
    if not blocks:
        raise ValueError("nothing to pack; expected a model with linear layers or experts, see exclude")
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").unlink(missing_ok=True)
    hessians = kind.needs_hessian(kind.method(method, True))
    asked = [format, method, activations, layout, list(include), list(exclude), length, count, text]
    parts = [target / PARTS / f"{number:05}.safetensors" for number in range(len(blocks))]
    resumed = begin_or_resume(target, sorted(source.glob("*.safetensors")), asked, parts)
    for names, part in zip(tqdm(blocks, desc="pack", unit="block", disable=not progress), parts):
        if part.name in resumed:
            with open_tensors(part) as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            biases, _ = place_packed(model, tensors, dict.fromkeys(tensors, part), target, activations)
            model.load_state_dict(biases, strict=False)
            continue
        seen = calibrate(model, batches, layers=names, hessians=hessians, progress=False)
        pack(model, format, method, seen, activations=activations, include=tuple(names), progress=False)
        write_safetensors(part, _stored(model, names, layout))
    save_checkpoint(model, target, layout, tokenizer)
    shutil.rmtree(target / PARTS)
    (target / PROGRESS).unlink()
    return [name for names in blocks for name in names]


def by_block(names: Iterable[str]) -> list[list[str]]:
    """Names of weights by the block that they are in, ``model.layers.3``; those outside of blocks come last."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        match = BLOCK.match(name)
        blocks.setdefault(match[1] if match else "", []).append(name)
    outside = blocks.pop("", None)
    return [*blocks.values(), *([outside] if outside else [])]


def _stored(model: nn.Module, chosen: Sequence[str], layout: str) -> dict[str, Tensor]:
    """The tensors of some packed weights, and the biases beside them, as the checkpoint will have them."""
    names = StoredNames(model)
    layers = {layer for stack in names.stacks.keys() & set(chosen) for layer in names.of(stack)}
    layers |= names.homes([name for name in chosen if name not in names.stacks]).keys()
    return {name: one for name, one in stored_as(model, layout).tensors.items() if name.rpartition(".")[0] in layers}
