"""What a package must be called with, and the check that it is.

AOTInductor's code does not look at what it is given: a wrong shape reads memory that isn't there. So a package says
what each input was when it was exported, flattened, in order:

    {"name": "x", "dtype": "float32", "shape": ["s0", 64]}       a tensor; sizes that may vary by their name
    {"name": "flag", "value": true}                              anything else is part of the code

and ``ranges`` says between what a size may vary. Tensors are contiguous: export and load make them so.
"""

from __future__ import annotations

import math
import re
from typing import Any, Mapping, Sequence

import torch
from torch.export import ExportedProgram

from fp8_compile.torch_internals.graphs import pytree

PLAIN = (type(None), bool, int, float, str)
# A size that varies: s0, 2*s0, s0 + 1, 2*s0 - 1. torch.export knows no others.
_VARYING = re.compile(r"(?:(?P<factor>[1-9]\d*)\*)?(?P<symbol>[A-Za-z_]\w*)(?: (?P<term>[+-] \d+))?")


def describe(program: ExportedProgram) -> dict[str, Any]:
    """``{"inputs": [...], "ranges": {...}}`` for an exported program."""
    given = pytree.tree_leaves(program.example_inputs)
    traced = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    inputs = []
    for value, name in zip(given, traced, strict=True):
        if isinstance(value, torch.Tensor):
            shape = [size if isinstance(size, int) else str(size) for size in nodes[name].meta["val"].shape]
            inputs.append({"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": shape})
        elif isinstance(value, PLAIN):
            inputs.append({"name": name, "value": value})
        else:
            raise ValueError(
                f"input {name} is a {type(value).__name__}; expected tensors, numbers, strings or None in args and "
                "kwargs (in lists, tuples and dicts too)"
            )
    ranges = {str(symbol): [_bound(one.lower), _bound(one.upper)] for symbol, one in program.range_constraints.items()}
    return {"inputs": inputs, "ranges": ranges}


def check_described(inputs: Sequence[Any], ranges: Mapping[str, Any]) -> None:
    """Raise where this is not what ``describe`` gives: calls are checked by it, so that it has to be right."""
    for number, one in enumerate(inputs):
        if not isinstance(one, dict) or not isinstance(one.get("name"), str):
            raise ValueError(f"input {number} has no name")
        if "shape" not in one:
            if "value" not in one or not isinstance(one["value"], PLAIN):
                raise ValueError(f"input {one['name']} has neither a shape nor a plain value")
            continue
        if not isinstance(one.get("dtype"), str) or not isinstance(getattr(torch, one["dtype"], None), torch.dtype):
            raise ValueError(f"input {one['name']} is of dtype {one.get('dtype')!r}; expected one of torch's")
        sizes = one["shape"] if isinstance(one["shape"], list) else [None]
        for size in sizes:
            whole = isinstance(size, int) and not isinstance(size, bool) and size >= 0
            if not whole and not (isinstance(size, str) and _VARYING.fullmatch(size)):
                raise ValueError(
                    f"input {one['name']} has the shape {one['shape']!r}; expected sizes, or names of those that vary"
                )
    for name, bounds in ranges.items():
        pair = isinstance(bounds, list) and len(bounds) == 2
        if not pair or not all(bound is None or type(bound) is int for bound in bounds):
            raise ValueError(f"size {name} varies between {bounds!r}; expected a pair of numbers or null")


def check(
    given: Sequence[Any], inputs: Sequence[Mapping[str, Any]], ranges: Mapping[str, Sequence[int | None]]
) -> None:
    """Raise where a call does not fit."""
    if len(given) != len(inputs):
        names = ", ".join(one["name"] for one in inputs)
        raise ValueError(f"the package takes {len(inputs)} inputs ({names}), got {len(given)}")
    sizes: dict[str, int] = {}
    for value, one in zip(given, inputs):
        if "shape" in one:
            _check_tensor(value, one, ranges, sizes)
        elif type(value) is not type(one["value"]) or value != one["value"]:
            raise ValueError(
                f"input {one['name']} was {one['value']!r} when the model was exported and is part of the code, "
                f"got {value!r}: export again with that value"
            )


def _check_tensor(
    value: Any, one: Mapping[str, Any], ranges: Mapping[str, Sequence[int | None]], sizes: dict[str, int]
) -> None:
    name, shape = one["name"], one["shape"]
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        got = value.device if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(f"input {name}: expected a tensor on the CPU, got {got}")
    if str(value.dtype) != f"torch.{one['dtype']}":
        raise TypeError(f"input {name}: expected {one['dtype']}, got {str(value.dtype).removeprefix('torch.')}")
    fits = value.dim() == len(shape)
    for size, expected in zip(value.shape, shape):
        if isinstance(expected, int):
            fits = fits and size == expected
        elif (found := _VARYING.fullmatch(expected)) is not None:
            factor, term = int(found["factor"] or 1), int((found["term"] or "0").replace(" ", ""))
            own, rest = divmod(size - term, factor)
            lower, upper = ranges.get(found["symbol"], (0, None))
            fits = fits and not rest and own >= (lower or 0) and (upper is None or own <= upper)
            fits = fits and sizes.setdefault(found["symbol"], own) == own
    if not fits:
        raise ValueError(
            f"input {name}: expected shape [{', '.join(map(str, shape))}]{_ranges(shape, ranges)}, got "
            f"{list(value.shape)}; sizes that shall vary are named in export's dynamic_shapes"
        )


def _ranges(shape: Sequence[int | str], ranges: Mapping[str, Sequence[int | None]]) -> str:
    known = [(name, *ranges[name]) for name in shape if isinstance(name, str) and name in ranges]
    texts = [f"{lower} <= {name}" + ("" if upper is None else f" <= {upper}") for name, lower, upper in known]
    return f" with {', '.join(texts)}" if texts else ""


def _bound(bound: Any) -> int | None:
    """A bound as a number; None where there is none."""
    value = float(bound) if getattr(bound, "is_number", True) else math.inf
    return None if math.isinf(value) or value >= 2**62 else int(value)
