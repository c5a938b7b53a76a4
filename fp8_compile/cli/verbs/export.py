"""Export a model ahead of time: a package that runs without Python, without a compiler, from packed weights.

    fp8-compile export serve:make_model model.pt2                               NVFP4 weights
    fp8-compile export serve:make_model model.pt2 --weights fp8 --dynamic x:0,1  sizes 0 and 1 of input x may vary
    fp8-compile export serve:make_model model.pt2 --weights fp8 --activations fp8 --calibration serve:make_batches

    fp8-compile export ./Llama-3.2-1B model.pt2 --tokens 256                    a Hugging Face folder, packed or not

A Hugging Face folder is called as model(input_ids) or model(pixel_values), and gives a tuple. MODULE:FACTORY is
imported from the current folder. FACTORY() returns (model, args) or (model, args, kwargs); that of --calibration
returns batches: tensors, tuples or dicts of the model's arguments.
"""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any, Sequence

from fp8_compile.cli.terminal import say

from .explain import innermost

HELP = "export a model to a package that runs without Python"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODULE:FACTORY | FOLDER", help="where the model comes from")
    parser.add_argument("output", type=Path, metavar="FILE.pt2", help="the package to write")
    parser.add_argument("--batch", type=int, default=1, help="of a Hugging Face model's input (default 1)")
    parser.add_argument("--tokens", type=int, default=128, help="of a Hugging Face model's input (default 128)")
    parser.add_argument(
        "--weights",
        choices=("nvfp4", "fp8", "fp8_blocks", "mxfp8", "none"),
        default="nvfp4",
        help="default nvfp4",
    )
    parser.add_argument("--method", help="how NVFP4 scales are chosen (default sweep; rtn is fastest)")
    parser.add_argument(
        "--activations",
        choices=("int8", "fp8", "mxfp8"),
        help="round inputs too: int8 with nvfp4 weights, fp8 with fp8 ones, mxfp8 (which it needs) with mxfp8 ones",
    )
    parser.add_argument(
        "--calibration", metavar="MODULE:FACTORY", help="batches to choose NVFP4 weights and FP8 input scales by"
    )
    parser.add_argument("--include", action="append", metavar="GLOB", help="layers to pack; repeat it")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="layers to leave alone; repeat it")
    parser.add_argument(
        "--dynamic", action="append", default=[], metavar="NAME:DIMS", help="dimensions of an input that vary: x:0,1"
    )
    parser.add_argument("--dump", type=Path, metavar="FOLDER", help="write the graphs and the report there")


def run(options: argparse.Namespace) -> int:
    from torch import nn

    import fp8_compile
    from fp8_compile.cli.model_source import load_batches, load_factory, load_huggingface_weights

    if Path(options.model).is_dir():
        model, args, kwargs = load_huggingface_weights(Path(options.model), options.batch, options.tokens)
    else:
        model, args, kwargs = load_factory(options.model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{options.model} gives {type(model).__name__}; expected a torch.nn.Module to export")
    if not args and not kwargs:
        raise ValueError(f"{options.model} gives a model but no inputs; return (model, args) from it")
    chosen = {name: getattr(options, name) for name in ("method", "activations", "include", "exclude", "dump")}
    if options.calibration:
        chosen["calibration"] = fp8_compile.calibrate(model, load_batches(options.calibration))
    dynamic_shapes = _dynamic_shapes(model, args, kwargs, options.dynamic)
    try:
        report = fp8_compile.export(
            model.eval(),
            args,
            options.output,
            kwargs=kwargs,
            weights=None if options.weights == "none" else options.weights,
            dynamic_shapes=dynamic_shapes,
            **{name: value for name, value in chosen.items() if value},
        )
    except RuntimeError as error:  # of torch.export: what it makes of the model's own code
        said = innermost(str(error)) or type(error).__name__
        raise ValueError(f"{options.model} can't be exported: {said} (--traceback shows where)") from error
    say(str(report))
    say(f"{options.output}: {options.output.stat().st_size / 1e6:,.1f} MB")
    return 0


def _dynamic_shapes(model: Any, args: Sequence[Any], kwargs: dict[str, Any], given: list[str]) -> Any:
    """``["x:0,1"]`` as ``torch.export`` wants it: a dict of every argument."""
    if not given:
        return None
    from torch.export import Dim

    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    shapes: dict[str, Any] = dict.fromkeys(bound)
    for text in given:
        match = re.fullmatch(r"(\w+):(\d+(?:,\d+)*)", text)
        if not match or match[1] not in bound:
            example, names = f"{next(iter(bound))}:0,1", ", ".join(bound)
            raise ValueError(f"--dynamic {text!r}: expected NAME:DIMS such as {example}, for one of the inputs {names}")
        shapes[match[1]] = {int(dim): Dim.DYNAMIC for dim in match[2].split(",")}
    return shapes
