"""What the backend would do to a model: every matmul, rewritten or skipped and why. Nothing is trained or compiled.

    fp8-compile explain train:make_model                     a function in train.py: returns the model and its inputs
    fp8-compile explain train:make_model --input int64[2,128] --recipe rowwise
    fp8-compile explain ./Llama-3.2-1B --tokens 256          a Hugging Face folder; its weights are not read
    fp8-compile explain train:make_model --target cuda:90 --dump folder && fp8-compile view folder

MODULE:FACTORY is imported from the current folder. FACTORY() returns a model, (model, args), or (model, args, kwargs);
it may also be a model itself.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

from fp8_compile.cli.terminal import say
from fp8_compile.torch_internals.graphs import quiet_fake_tensors

HELP = "report on a model without training it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODULE:FACTORY | FOLDER", help="where the model comes from")
    parser.add_argument(
        "--input", action="append", default=[], metavar="DTYPE[SIZES]", help="an argument: float32[8,64]; repeat it"
    )
    parser.add_argument("--batch", type=int, default=1, help="of a Hugging Face model's input (default 1)")
    parser.add_argument("--tokens", type=int, default=128, help="of a Hugging Face model's input (default 128)")
    parser.add_argument("--recipe", help="delayed (default), tensorwise, rowwise or blockwise")
    parser.add_argument("--target", help="decide for cpu, cuda:90, cuda:100, hip:gfx942, ...")
    parser.add_argument("--include", action="append", metavar="GLOB", help="modules to rewrite; repeat it")
    parser.add_argument("--exclude", action="append", metavar="GLOB", help="modules to leave alone; repeat it")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="any other field of Config; repeat it"
    )
    parser.add_argument("--dump", metavar="FOLDER", help="write the dump and report.html there")
    parser.add_argument("--json", action="store_true", help="print report.json instead of a table")


def run(options: argparse.Namespace) -> int:
    import fp8_compile
    from fp8_compile.cli.model_source import load_factory, load_huggingface, parse_input

    config = fp8_compile.Config(**config_fields(options))
    if Path(options.model).is_dir():
        model, args, kwargs = load_huggingface(Path(options.model), options.batch, options.tokens)
    else:
        model, args, kwargs = load_factory(options.model)
    if options.input:
        args, kwargs = tuple(parse_input(text) for text in options.input), {}
    if not args and not kwargs:
        raise ValueError(
            f"{options.model} gives a model but no inputs; return (model, args) from it, or give --input DTYPE[SIZES]"
        )
    if not options.traceback:  # torch logs the traceback of an operation that fails, before we can say what is wrong
        quiet_fake_tensors()
    try:
        report = fp8_compile.explain(model, args=args, kwargs=kwargs, config=config)
    except RuntimeError as error:  # what Dynamo makes of an error in the model's own code
        said = innermost(str(error)) or type(error).__name__
        raise ValueError(f"{options.model} does not run with these inputs: {said} (--traceback shows where)") from error
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        say(str(report))
        if options.dump:
            say(f"\nto look at it: fp8-compile view {shlex.quote(options.dump)}")
    return 0


def innermost(message: str) -> str:
    """What went wrong, out of pages of where: ``RuntimeError('a and b must have ...')``, else the first line."""
    quoted = re.search(r"\w*(?:Error|Exception)\(.*\)", message)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return quoted[0] if quoted else first


def config_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of Config from the command's options."""
    fields = {name: getattr(options, name) for name in ("recipe", "target", "dump") if getattr(options, name)}
    fields |= {name: tuple(getattr(options, name)) for name in ("include", "exclude") if getattr(options, name)}
    for text in options.option:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--option {text!r} has no value; expected NAME=VALUE such as margin=1")
        fields[name] = _literal(value)
    return fields


def _literal(text: str) -> Any:
    """True, 3, ("a", "b"); what is none of Python's literals is a text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
