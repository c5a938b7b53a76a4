"""Graphs as text: for golden tests and for messages."""

from __future__ import annotations

import collections
import difflib
import operator
import textwrap
from typing import Any, Callable

import torch
from torch import fx

from fp8_compile.kernels.formats import BY_DTYPE

aten = torch.ops.aten

DTYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float64: "f64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "b8",
    **{dtype: format.name for dtype, format in BY_DTYPE.items()},
}
SHORT_NAMES = {"convert_element_type": "to", "constant_pad_nd": "pad"}
SEEN_IN_THE_VALUE = ("out_dtype", "memory_format")  # arguments that the type on the left says too


def render(graph: fx.Graph, only: Callable[[fx.Node], bool] | None = None) -> str:
    """One line per node: ``mm: f32[8, 64] = mm(primals_2, primals_1.T)``; with ``only``, of those nodes.

    Nodes are called by their op and counted. A transpose is ``.T`` where it is used, one result of several is
    ``quantize[0]``, an alias is what it stands for. A matrix stored column by column is ``f32[32, 64]T``; any other
    layout that is not row-major has its strides in braces. Arguments that are None or False are left out.
    """
    seen: collections.Counter[str] = collections.Counter()
    names: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append("return " + _text(node.args[0], names)[1:-1])
        elif (short := _shorthand(node, names)) is not None:
            names[node] = short
        else:
            op = op_name(node) if node.op == "call_function" else node.name
            names[node] = f"{op}_{seen[op]}" if seen[op] else op
            seen[op] += 1
            if only is None or only(node):
                lines.append(_line(node, names))
    return "\n".join("\n    ".join(textwrap.wrap(line, 116)) for line in lines) + "\n"


def difference(before: fx.Graph, after: fx.Graph, only: Callable[[fx.Node], bool] | None = None) -> str:
    """The lines of ``render`` that a pass took out (``-``) and put in (``+``). Another golden test shows those before.

    So a change of what all passes leave alone edits one golden test.
    """
    lines = difflib.Differ().compare(render(before, only).splitlines(), render(after, only).splitlines())
    return "".join(f"{line}\n" for line in lines if line[0] in "-+")


def ops(graph: fx.Graph) -> dict[str, int]:
    """How often each op occurs."""
    return dict(collections.Counter(op_name(node) for node in graph.nodes if node.op == "call_function"))


def op_name(node: fx.Node) -> str:
    """``mm`` for ``aten.mm.default``, ``bitcast`` for ``aten.view.dtype``."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__name__", str(node.target))
    name = node.target._schema.name.partition("::")[2]
    if node.target is aten.view.dtype:
        return "bitcast"
    return SHORT_NAMES.get(name, name)


def describe(val: Any) -> str:
    """``bf16[8, 64]``, ``e4m3[32, 64]T``, ``(e4m3[8, 32], f32[1, 1])``."""
    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(map(describe, val)) + ")"
    if not isinstance(val, torch.Tensor):
        return str(val)
    text = f"{DTYPES[val.dtype]}[{', '.join(map(str, val.shape))}]"
    if val.is_contiguous():
        return text
    return text + ("T" if val.dim() == 2 and val.t().is_contiguous() else f"{{{', '.join(map(str, val.stride()))}}}")


def _shorthand(node: fx.Node, names: dict[fx.Node, str]) -> str | None:
    if node.op != "call_function":
        return None
    if node.target is aten.permute.default and list(node.args[1]) == [1, 0]:
        inner = names[node.args[0]]
        return inner.removesuffix(".T") if inner.endswith(".T") else f"{inner}.T"
    if node.target is aten.alias.default:
        return names[node.args[0]]
    if node.target is operator.getitem:
        return f"{names[node.args[0]]}[{node.args[1]}]"
    return None


def _line(node: fx.Node, names: dict[fx.Node, str]) -> str:
    left = f"{names[node]}: {describe(node.meta['val'])}"
    if node.op == "placeholder":
        return left
    arguments = [_text(item, names) for item in node.args]
    for key, item in node.kwargs.items():
        if item not in (None, False) and key not in SEEN_IN_THE_VALUE:
            arguments.append(key.removeprefix("use_") if item is True else f"{key}={_text(item, names)}")
    return f"{left} = {op_name(node)}({', '.join(arguments)})"


def _text(item: Any, names: dict[fx.Node, str]) -> str:
    if isinstance(item, (list, tuple)):
        return "[" + ", ".join(_text(one, names) for one in item) + "]"
    if isinstance(item, fx.Node):
        return names[item]
    return DTYPES.get(item, str(item)) if isinstance(item, torch.dtype) else str(item)
