"""Models named on the command line: a factory in a module of the user's, or a Hugging Face folder."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # model, args, kwargs

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int64", "int32", "bool")}


def load_factory(spec: str) -> Call:
    """The model and inputs that ``module:factory`` gives."""
    factory = _named(spec)
    if isinstance(factory, nn.Module):
        return factory, (), {}
    if not callable(factory):
        raise TypeError(f"{spec} is {type(factory).__name__}; expected a function that returns a model, or a model")
    return _call(spec, _made(spec, factory))


def load_batches(spec: str) -> list[Any]:
    """The batches that ``module:name`` is, or that it returns if it is a function; a list, since calibration runs them
    twice."""
    found = _named(spec)
    batches = _made(spec, found) if callable(found) else found
    if isinstance(batches, (torch.Tensor, str, dict)) or not hasattr(batches, "__iter__"):
        got = type(batches).__name__
        raise TypeError(f"{spec} gives {got}; expected an iterable of batches: tensors, tuples or dicts of arguments")
    return list(batches)


def _made(spec: str, factory: Any) -> Any:
    try:
        return factory()
    except Exception as error:
        raise ValueError(f"{spec}() failed: {_said(error)}; expected a factory that takes no arguments") from error


def _named(spec: str) -> Any:
    """What ``module:name`` names."""
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f"{spec!r} is neither a folder nor MODULE:FACTORY such as train:make_model")
    if module_name.endswith(".py"):
        raise ValueError(f"{spec!r} names a file; expected a module: {module_name.removesuffix('.py')}:{name}")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except SystemExit as error:
        remedy = "put what it does as a script under if __name__ == '__main__'"
        raise ValueError(f"importing {module_name!r} ended the program; {remedy}") from error
    except Exception as error:  # whatever the user's module does when imported
        raise ValueError(f"cannot import {module_name!r} from {os.getcwd()}: {_said(error)}") from error
    factory: Any = module
    for part in name.split("."):
        if not hasattr(factory, part):
            raise ValueError(f"{module_name} has no {name!r}; it has: {', '.join(_public(module)) or 'nothing'}")
        factory = getattr(factory, part)
    return factory


def _call(spec: str, made: Any) -> Call:
    parts = made if isinstance(made, tuple) and made else (made,)
    model, args, kwargs = (*parts, *((), {})[len(parts) - 1 :])[:3]
    if not callable(model):
        got = type(model).__name__
        raise TypeError(f"{spec}() returned {got}; expected a model, (model, args) or (model, args, kwargs)")
    if not isinstance(kwargs, dict):
        got = type(kwargs).__name__
        raise TypeError(f"{spec}() returned {got} in third place; expected a dict of keyword arguments")
    return model, tuple(args) if isinstance(args, (tuple, list)) else (args,), kwargs


def parse_input(text: str) -> torch.Tensor:
    """The tensor that ``float32[8,64]`` describes, to trace with. It is all zeros: every table has a row 0."""
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\]", text)
    if not match or match[1] not in DTYPES:
        raise ValueError(f"--input {text!r} is no tensor; expected DTYPE[SIZES] with one of {', '.join(DTYPES)}")
    sizes = [int(size) for size in match[2].replace(" ", "").split(",") if size]
    return torch.zeros(sizes, dtype=DTYPES[match[1]])


def load_huggingface(folder: Path, batch: int, tokens: int) -> Call:
    """The model of a ``config.json`` on the meta device: no weight is read, no memory taken."""
    config, cls = _huggingface_class(folder, batch, tokens)
    with torch.device("meta"):
        model = cls(config) if cls is not None else _auto_model(config)
        return model, (), _huggingface_inputs(model, config, batch, tokens, training=True)


def load_huggingface_weights(folder: Path, batch: int, tokens: int) -> Call:
    """The model of a Hugging Face folder with its weights, packed or not, and inputs of inference.

    Its results are tuples: whoever has only the package could not read a class of transformers."""
    config, cls = _huggingface_class(folder, batch, tokens)
    if getattr(config, "quantization_config", None) is not None:
        from fp8_compile import load_checkpoint

        del config.quantization_config
        model = cls(config) if cls is not None else _auto_model(config)
        load_checkpoint(model, folder)
    else:
        import transformers

        try:
            model = (cls or transformers.AutoModel).from_pretrained(folder)
        except Exception as error:
            raise ValueError(f"transformers can't load the weights in {folder}: {_said(error)}") from error
    inputs = _huggingface_inputs(model, config, batch, tokens, training=False)
    return model.eval(), (), {**inputs, "return_dict": False}


def _auto_model(config: Any) -> Any:
    import transformers

    return transformers.AutoModel.from_config(config)


def _huggingface_class(folder: Path, batch: int, tokens: int) -> tuple[Any, Any]:
    """The configuration of a folder, and the class that it names; None where transformers has no such class."""
    if batch < 1 or tokens < 1:
        raise ValueError(f"--batch {batch} --tokens {tokens}: expected at least 1 each")
    try:
        architectures = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{folder} is no Hugging Face folder: config.json: {error}") from error
    try:
        import transformers
    except ImportError as error:
        raise ValueError("a Hugging Face folder needs the transformers package: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise ValueError(f"transformers can't read {folder}/config.json: {_said(error)}") from error
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    cls = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    return config, cls


def _huggingface_inputs(model: nn.Module, config: Any, batch: int, tokens: int, *, training: bool) -> dict[str, Any]:
    if model.main_input_name == "input_ids":
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        causal = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM"))
        no_cache = {"use_cache": False} if getattr(config, "use_cache", False) else {}
        return {"input_ids": ids, **({"labels": ids} if causal and training else {}), **no_cache}
    if model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        return {"pixel_values": torch.zeros(batch, config.num_channels, config.image_size, config.image_size)}
    raise ValueError(
        f"{type(model).__name__} takes {model.main_input_name}, which can't be made up here; "
        "write a factory that returns (model, args, kwargs) and name it as MODULE:FACTORY"
    )


def _public(module: Any) -> list[str]:
    return [name for name, item in vars(module).items() if not name.startswith("_") and callable(item)][:20]


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().removesuffix(":")
