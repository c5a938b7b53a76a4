"""A compiled graph as a picture of precision: networkx, GraphML and DOT."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any, Literal

import networkx as nx
import torch
from torch import fx

from fp8_compile.kernels.formats import BY_DTYPE as FP8_FORMATS
from fp8_compile.passes.graph.marks import mark_of
from fp8_compile.torch_internals.graphs import OpOverload, pytree

Kind = Literal["input", "output", "matmul", "fp8_matmul", "quantize", "dequantize", "view", "other"]

NAMESPACE = "fp8_compile"
MATMULS = frozenset(
    "mm addmm bmm baddbmm addbmm mv addmv dot matmul linear einsum _addmm_activation _int_mm _grouped_mm"
    " grouped_mm_fallback grouped_mm_fallback_backward".split()
)
FP8_MATMULS = frozenset("_scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2".split())
CASTS = frozenset("convert_element_type _to_copy to".split())
# Views whose schema does not say so; the others are known by ``OpOverload.is_view``.
VIEWS = frozenset("getitem _unsafe_view view reshape permute transpose t expand squeeze unsqueeze flatten".split())

PRECISION_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    **{dtype: f"fp8_{format}" for dtype, format in FP8_FORMATS.items()},
    torch.float8_e8m0fnu: "fp8_e8m0",
    torch.float4_e2m1fn_x2: "fp4_e2m1",
}

# The Okabe-Ito palette, which colour-blind readers can tell apart too.
KIND_COLOURS = {"matmul": "#E69F00", "fp8_matmul": "#009E73", "quantize": "#56B4E9", "dequantize": "#CC79A7"}
PRECISION_COLOURS = {"fp8": "#009E73", "fp4": "#F0E442", "bf16": "#0072B2", "fp16": "#0072B2", "fp32": "#D55E00"}
NO_COLOUR = "#999999"

# What XML 1.0 forbids or changes, what breaks a line, and the backslash, so that different names stay different.
_UNPRINTABLE = re.compile("[\\\\\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def to_networkx(graph: fx.Graph) -> nx.DiGraph:
    """A node per fx node, an edge per use of its value; every attribute is a string or an int.

    ``label, op, target``  as in fx
    ``kind``               see :data:`Kind`
    ``precision, shape``   of the value, "bf16" and "[4, 8]"; several values are joined by ", "; no tensor: "-" and ""
    ``bytes``              of the value; 0 where a dimension is symbolic
    ``module, gemm``       what the rewrite noted (``passes/graph/marks.py``)
    ``phase``              "forward" or "backward", as AOTAutograd tagged it or as its inputs are; "" where nothing says
    """
    result = nx.DiGraph()
    for node in graph.nodes:
        name, producers = printable(node.name), [printable(producer.name) for producer in node.all_input_nodes]
        # Uses come after definitions, so the producers have been added already.
        phase = phase_of(node, {result.nodes[producer]["phase"] for producer in producers})
        result.add_node(name, **attributes(node), phase=phase)
        result.add_edges_from((producer, name) for producer in producers)
    return result


def write_graphml(graph: fx.Graph, path: str | os.PathLike[str]) -> None:
    """Write GraphML that ``networkx.read_graphml`` reads back unchanged; yEd and Gephi open it too."""
    # Not nx.write_graphml: it uses lxml where that is installed, which would be a second writer to test.
    nx.write_graphml_xml(to_networkx(graph), path)


def write_dot(graph: fx.Graph, path: str | os.PathLike[str]) -> None:
    """Write Graphviz DOT: boxes filled by kind, borders and edges coloured by precision."""
    flow = to_networkx(graph)
    lines = ["digraph fp8_compile {", '  node [shape=box, style=filled, penwidth=2, fontname="monospace"];']
    for name, node in flow.nodes(data=True):
        fill, line = KIND_COLOURS.get(node["kind"], "#FFFFFF"), _precision_colour(node["precision"])
        lines.append(f'  {_quote(name)} [label={_dot_label(node)}, fillcolor="{fill}", color="{line}"];')
    for producer, user in flow.edges:
        line = _precision_colour(flow.nodes[producer]["precision"])
        lines.append(f'  {_quote(producer)} -> {_quote(user)} [color="{line}"];')
    Path(path).write_text("\n".join([*lines, "}", ""]), encoding="utf-8")


def attributes(node: fx.Node) -> dict[str, str | int]:
    """Return the attributes that :func:`to_networkx` lists, except the phase."""
    tensors = tensors_of(node)
    return {
        "label": printable(node.name),
        "op": node.op,
        "target": printable(_target_name(node.target)),
        "kind": _kind(node),
        "precision": ", ".join(_precision(tensor.dtype) for tensor in tensors) or "-",
        "shape": ", ".join(f"[{', '.join(map(str, tensor.shape))}]" for tensor in tensors),
        "bytes": _static_bytes(tensors),
        "module": printable(mark_of(node).module),
        "gemm": printable(mark_of(node).gemm or ""),
    }


def _kind(node: fx.Node) -> Kind:
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if node.op == "output":
        return "output"
    namespace, name = _namespace_and_name(node.target)
    if name in CASTS:
        return _cast_kind(node)
    if namespace == NAMESPACE and name.startswith(("quantize", "dequantize")):
        return "quantize" if name.startswith("quantize") else "dequantize"
    if name in FP8_MATMULS or (namespace == NAMESPACE and name.endswith(("mm", "matmul"))):
        return "fp8_matmul"
    if name in MATMULS:
        return "matmul"
    return "view" if name in VIEWS or getattr(node.target, "is_view", False) else "other"


def _cast_kind(node: fx.Node) -> Kind:
    dtypes = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, torch.dtype)]
    if dtypes and dtypes[0] in FP8_FORMATS:
        return "quantize"
    from_fp8 = any(tensor.dtype in FP8_FORMATS for source in node.all_input_nodes for tensor in tensors_of(source))
    return "dequantize" if dtypes and from_fp8 else "other"


def _namespace_and_name(target: Any) -> tuple[str, str]:
    """("aten", "mm") of ``aten.mm.default``, ("_operator", "getitem") of ``operator.getitem``."""
    if isinstance(target, OpOverload):
        return target.namespace, target.overloadpacket.__name__
    if isinstance(target, str):  # the name of a method or a submodule
        return "", target
    return (getattr(target, "__module__", None) or "").partition(".")[0], getattr(target, "__name__", "")


def _target_name(target: Any) -> str:
    name = getattr(target, "__qualname__", None)
    if name is None or isinstance(target, OpOverload):  # its qualname is "aten::mm", which fx never prints
        return str(target)
    return f"{target.__module__}.{name}"


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors that a node computes, as the tracer knows them."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def _precision(dtype: torch.dtype) -> str:
    return PRECISION_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _static_bytes(tensors: list[torch.Tensor]) -> int:
    if any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape):
        return 0
    return sum(math.prod(tensor.shape) * tensor.element_size() for tensor in tensors)


def phase_of(node: fx.Node, producers: set[str]) -> str:
    """Return the phase in which a node runs, given the phases of its inputs."""
    tag = node.meta.get("partitioner_tag") or ""  # "is_forward", "must_be_in_backward", ...
    if tag or node.op == "output":
        return next((phase for phase in ("forward", "backward") if tag.endswith(phase)), "")
    # Nodes of our passes have no tag: the partitioner puts them where their inputs are, and so do we.
    return max(producers - {""}, key=("forward", "backward").index, default="")


def _precision_colour(precision: str) -> str:
    return next((colour for start, colour in PRECISION_COLOURS.items() if precision.startswith(start)), NO_COLOUR)


def printable(text: object) -> str:
    """Return text that XML, JSON and a terminal accept as it is."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _dot_label(node: dict[str, Any]) -> str:
    value = f"{node['precision']} {node['shape']}" if node["shape"] else ""
    lines = dict.fromkeys((node["label"], node["target"], value, f"{node['module']} {node['gemm']}".strip()))
    # Graphviz reads &lt; in a label as <, so a literal & has to be an entity itself.
    return _quote("\n".join(filter(None, lines)).replace("&", "&amp;")).replace("\n", "\\n")
