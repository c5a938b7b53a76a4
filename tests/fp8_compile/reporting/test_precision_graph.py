"""The graph as networkx, GraphML and DOT."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import expecttest
import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fp8_compile.kernels.cpu.scaled_grouped_mm import scaled_grouped_mm_op
from fp8_compile.kernels.quantize import quantize_op
from fp8_compile.passes.graph.marks import KEY, Mark
from fp8_compile.reporting.precision_graph import to_networkx, write_dot, write_graphml

aten, prims = torch.ops.aten, torch.ops.prims
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MARKED = ("matmul", "fp8_matmul", "quantize", "dequantize")

QUOTED = r'"((?:[^"\\\n]|\\[^\n])*)"'
HOSTILE = (
    'say "hi"',
    "back\\slash\\",
    "two\nlines\r\n",
    "<script>alert('x')</script>",
    "]]> &lt; & &amp;",
    "nul\x00 bell\x07 escape\x1b",
    "half a pair \ud800",
    "naïve 数 🚀 \u2028",
    '\\" -> "a" [',
    "not characters \ufffe \uffff",
    "\\x00",
    "\x00",
)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any, val: Any = None, **notes: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {**({} if val is None else {"val": val}), **notes}
    return node


def given_input(graph: fx.Graph, name: str, val: Any = None, **notes: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = {**({} if val is None else {"val": val}), **notes}
    return node


def fp8_linear() -> fx.Graph:
    """y = x @ w in FP8, as the rewrite leaves it."""
    graph = fx.Graph()
    x = given_input(graph, "x", meta(16, 32), partitioner_tag="is_forward")
    w = given_input(graph, "w", meta(32, 64), partitioner_tag="is_forward")
    notes = {KEY: Mark(module="blocks.0.up", gemm="output")}
    scale = meta(1, 1, dtype=torch.float32)
    pair = call(graph, quantize_op, x, E4M3, [-1, -1], val=(meta(16, 32, dtype=E4M3), scale), **notes)
    qx = call(graph, operator.getitem, pair, 0, val=meta(16, 32, dtype=E4M3))
    qw = call(graph, prims.convert_element_type.default, w, E4M3, val=meta(32, 64, dtype=E4M3))
    y = call(graph, aten._scaled_mm.default, qx, qw, val=meta(16, 64), **notes)
    graph.output((y,))
    return graph


def mlp_step(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss = (torch.relu(x @ up) @ down).sum()
    return torch.autograd.grad(loss, [x, up, down])


def traced_mlp(mode: str = "fake", dtype: torch.dtype = torch.bfloat16) -> fx.Graph:
    shapes = (8, 16), (16, 48), (48, 16)
    return make_fx(mlp_step, tracing_mode=mode)(*(torch.ones(s, dtype=dtype, requires_grad=True) for s in shapes)).graph


def hostile_graph(names: tuple[str, ...] = HOSTILE) -> fx.Graph:
    """A chain whose names, targets and notes are all of them hostile."""
    graph = fx.Graph()
    node = graph.placeholder("start")
    for name in names:
        node = graph.call_function(operator.neg, (node,))
        node.name = name
        node.target = name
        node.meta = {"val": meta(2), KEY: Mark(module=name, gemm=name)}
    graph.output(node)
    return graph


def parse_dot(text: str) -> tuple[dict[str, str], set[tuple[str, str]]]:
    """Nodes with their labels and edges of a DOT file; anything that is not exactly a statement of ours fails."""
    header, defaults, *statements, end, after = text.split("\n")
    assert re.fullmatch(r"digraph \w+ \{", header) and re.fullmatch(r"  node \[[^]]*\];", defaults)
    assert (end, after) == ("}", "")
    labels: dict[str, str] = {}
    edges: set[tuple[str, str]] = set()
    colour = r'"#[0-9A-F]{6}"'
    for statement in statements:
        if node := re.fullmatch(rf"  {QUOTED} \[label={QUOTED}, fillcolor={colour}, color={colour}\];", statement):
            labels[unquote(node[1])] = node[2]
        else:
            edge = re.fullmatch(rf"  {QUOTED} -> {QUOTED} \[color={colour}\];", statement)
            assert edge, f"not a statement: {statement}"
            edges.add((unquote(edge[1]), unquote(edge[2])))
    return labels, edges


def unquote(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def column(graph: nx.DiGraph, attribute: str) -> dict[str, Any]:
    return dict(graph.nodes(data=attribute))


def assert_reads_back(graph: fx.Graph, path: Path) -> None:
    write_graphml(graph, path)
    expected, read = to_networkx(graph), nx.read_graphml(path)
    assert isinstance(read, nx.DiGraph) and not read.is_multigraph()
    assert dict(read.nodes(data=True)) == dict(expected.nodes(data=True))
    assert set(read.edges) == set(expected.edges)


def test_each_kind_of_node_is_recognised_in_a_rewritten_graph() -> None:
    assert column(to_networkx(fp8_linear()), "kind") == {
        "x": "input",
        "w": "input",
        "quantize_default": "quantize",
        "getitem": "view",
        "convert_element_type_default": "quantize",
        "_scaled_mm_default": "fp8_matmul",
        "output": "output",
    }


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (aten.mm.default, "matmul"),
        (aten.addmm.default, "matmul"),
        (aten.bmm.default, "matmul"),
        (aten.baddbmm.default, "matmul"),
        (torch.matmul, "matmul"),
        (aten._grouped_mm.default, "matmul"),
        (aten._scaled_grouped_mm.default, "fp8_matmul"),
        (scaled_grouped_mm_op, "fp8_matmul"),
        (aten.permute.default, "view"),
        (aten.view.dtype, "view"),
        (aten._unsafe_view.default, "view"),
        (aten.slice.Tensor, "view"),
        (aten.clone.default, "other"),
        (aten.relu_.default, "other"),
        (aten.amax.default, "other"),
    ],
)
def test_an_operation_has_the_kind_of_its_name(target: Callable[..., Any], kind: str) -> None:
    graph = fx.Graph()
    node = call(graph, target, given_input(graph, "x"))
    assert to_networkx(graph).nodes[node.name]["kind"] == kind


def test_operations_of_our_namespace_are_known_by_name_and_those_of_another_are_not() -> None:
    mine, theirs = (torch.library.Library(namespace, "FRAGMENT") for namespace in ("fp8_compile", "not_fp8_compile"))
    kinds = {}
    for library, name in (
        (mine, "quantize_fused_for_this_test"),
        (mine, "dequantize_for_this_test"),
        (mine, "for_this_test_mm"),
        (theirs, "quantize_fused_for_this_test"),
    ):
        library.define(f"{name}(Tensor x) -> Tensor")
        graph = fx.Graph()
        op = getattr(getattr(torch.ops, library.ns), name).default
        node = call(graph, op, given_input(graph, "x"))
        kinds[library.ns, name] = to_networkx(graph).nodes[node.name]["kind"]
    assert list(kinds.values()) == ["quantize", "dequantize", "fp8_matmul", "other"]


@pytest.mark.parametrize(
    ("source", "to", "kind"),
    [
        (torch.bfloat16, E4M3, "quantize"),
        (torch.float32, E5M2, "quantize"),
        (None, E5M2, "quantize"),
        (E4M3, torch.float32, "dequantize"),
        (E5M2, torch.bfloat16, "dequantize"),
        (torch.bfloat16, torch.float32, "other"),
        (None, torch.float32, "other"),
    ],
)
def test_a_cast_to_or_from_fp8_is_a_quantize_or_a_dequantize(
    source: torch.dtype | None, to: torch.dtype, kind: str
) -> None:
    graph = fx.Graph()
    x = given_input(graph, "x", None if source is None else meta(2, dtype=source))
    positional = call(graph, prims.convert_element_type.default, x, to)
    by_keyword = graph.call_function(aten._to_copy.default, (x,), {"dtype": to})
    kinds = column(to_networkx(graph), "kind")
    assert (kinds[positional.name], kinds[by_keyword.name]) == (kind, kind)


def test_a_copy_to_another_device_of_an_fp8_tensor_is_not_a_dequantize() -> None:
    graph = fx.Graph()
    x = given_input(graph, "x", meta(2, dtype=E4M3))
    copy = graph.call_function(aten._to_copy.default, (x,), {"device": torch.device("cpu")})
    assert to_networkx(graph).nodes[copy.name]["kind"] == "other"


def test_precision_shape_and_bytes_follow_the_value() -> None:
    graph = fx.Graph()
    values = {
        "e4m3": meta(16, 32, dtype=E4M3),
        "e5m2": meta(3, dtype=E5M2),
        "half": meta(2, 3, dtype=torch.float16),
        "index": meta(5, dtype=torch.int64),
        "scalar": meta(dtype=torch.float64),
        "empty": meta(0, 8),
        "pair": (meta(4, 4, dtype=E4M3), None, meta(1, dtype=torch.float32)),
        "number": 3,
        "nothing": None,
    }
    for name, val in values.items():
        given_input(graph, name, val)
    nodes = to_networkx(graph).nodes
    assert {name: tuple(nodes[name][key] for key in ("precision", "shape", "bytes")) for name in values} == {
        "e4m3": ("fp8_e4m3", "[16, 32]", 512),
        "e5m2": ("fp8_e5m2", "[3]", 3),
        "half": ("fp16", "[2, 3]", 12),
        "index": ("int64", "[5]", 40),
        "scalar": ("fp64", "[]", 8),
        "empty": ("bf16", "[0, 8]", 0),
        "pair": ("fp8_e4m3, fp32", "[4, 4], [1]", 20),
        "number": ("-", "", 0),
        "nothing": ("-", "", 0),
    }


def test_module_gemm_and_phase_come_from_the_notes_of_the_passes() -> None:
    graph = fx.Graph()
    x = given_input(graph, "x", partitioner_tag="is_forward")
    g = given_input(graph, "g", partitioner_tag="is_backward")
    late = call(graph, aten.neg.default, x, partitioner_tag="must_be_in_backward")
    gemm = call(graph, aten.mm.default, g, x, fp8=Mark(module="blocks.1.up", gemm="grad_weight"))
    early = call(graph, aten.neg.default, x)
    alone = call(graph, aten.scalar_tensor.default, 0)
    graph.output((late, gemm, early, alone))
    made = to_networkx(graph)
    assert [made.nodes[gemm.name][key] for key in ("module", "gemm")] == ["blocks.1.up", "grad_weight"]
    assert [made.nodes["x"][key] for key in ("module", "gemm")] == ["", ""]
    # The pass's own nodes have no tag and run where their inputs are.
    expected = dict(x="forward", g="backward", neg_default="backward", mm_default="backward", neg_default_1="forward")
    assert column(made, "phase") == {**expected, "scalar_tensor_default": "", "output": ""}


def test_a_real_training_step_has_its_six_matmuls_and_its_data_flow() -> None:
    graph = traced_mlp()
    made = to_networkx(graph)
    matmuls = {name: node for name, node in made.nodes(data=True) if node["kind"] == "matmul"}
    assert len(matmuls) == 6
    assert {node["precision"] for node in matmuls.values()} == {"bf16"}
    assert sorted(node["bytes"] for node in matmuls.values()) == sorted(
        2 * n for n in (8 * 48, 8 * 16, 48 * 16, 8 * 48, 16 * 48, 8 * 16)
    )
    assert {node["target"] for node in matmuls.values()} == {"aten.mm.default"}
    assert set(made.edges) == {(arg.name, node.name) for node in graph.nodes for arg in node.all_input_nodes}
    assert nx.is_directed_acyclic_graph(made)


def test_symbolic_shapes_are_named_and_add_no_guard() -> None:
    graph = traced_mlp("symbolic")
    x = next(iter(graph.nodes))
    shape_env = x.meta["val"].shape[0].node.shape_env
    guards = len(shape_env.guards)
    made = to_networkx(graph)
    tokens = x.meta["val"].shape[0]
    assert made.nodes[x.name]["shape"].startswith(f"[{tokens}, ")
    assert {node["bytes"] for _, node in made.nodes(data=True) if node["kind"] == "matmul"} == {0}
    sizes = [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.SymInt)]
    assert sizes and {made.nodes[node.name]["precision"] for node in sizes} == {"-"}
    assert len(shape_env.guards) == guards


def test_a_traced_fp8_product_shows_its_quantizes_and_its_upcast() -> None:
    def product(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        qx, qw = x.to(E4M3), w.to(E5M2)
        return torch._scaled_mm(qx, qw.t(), scale, scale, out_dtype=torch.bfloat16) + qx.to(torch.bfloat16).sum()

    with FakeTensorMode():
        inputs = torch.ones(16, 32, dtype=torch.bfloat16), torch.ones(64, 32, dtype=torch.bfloat16), torch.ones(())
        made = to_networkx(make_fx(product)(*inputs).graph)
    marked = [(node["kind"], node["precision"]) for _, node in made.nodes(data=True) if node["kind"] in MARKED]
    assert marked == [
        ("quantize", "fp8_e4m3"),
        ("quantize", "fp8_e5m2"),
        ("fp8_matmul", "bf16"),
        ("dequantize", "bf16"),
    ]


@pytest.mark.parametrize("make", [fp8_linear, traced_mlp, lambda: traced_mlp("symbolic"), hostile_graph, fx.Graph])
def test_graphml_is_read_back_as_it_was_written(make: Callable[[], fx.Graph], tmp_path: Path) -> None:
    assert_reads_back(make(), tmp_path / "graph.graphml")


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5, unique=True))
def test_any_text_as_a_name_survives_graphml_and_dot(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("names")
    graph = hostile_graph(tuple(f"_{name}" for name in names))
    assert_reads_back(graph, folder / "graph.graphml")
    write_dot(graph, folder / "graph.dot")
    labels, edges = parse_dot((folder / "graph.dot").read_text(encoding="utf-8"))
    assert set(labels) == set(to_networkx(graph).nodes) and edges == set(to_networkx(graph).edges)


def test_hostile_names_stay_apart_and_can_be_read() -> None:
    names = list(to_networkx(hostile_graph()).nodes)[1:-1]
    assert len(set(names)) == len(HOSTILE)
    assert names[HOSTILE.index("\x00")] == "\\x00" and names[HOSTILE.index("\\x00")] == "\\\\x00"
    assert names[2] == "two\\nlines\\r\\n"
    assert names[3] == "<script>alert('x')</script>"
    assert names[7].startswith("naïve 数 🚀 ")


def test_dot_of_a_rewritten_graph(tmp_path: Path) -> None:
    write_dot(fp8_linear(), tmp_path / "graph.dot")
    expecttest.assert_expected_inline(
        (tmp_path / "graph.dot").read_text(),
        """\
digraph fp8_compile {
  node [shape=box, style=filled, penwidth=2, fontname="monospace"];
  "x" [label="x\\nbf16 [16, 32]", fillcolor="#FFFFFF", color="#0072B2"];
  "w" [label="w\\nbf16 [32, 64]", fillcolor="#FFFFFF", color="#0072B2"];
  "quantize_default" [label="quantize_default\\nfp8_compile.quantize.default\\nfp8_e4m3, fp32 [16, 32], [1, 1]\\nblocks.0.up output", fillcolor="#56B4E9", color="#009E73"];
  "getitem" [label="getitem\\n_operator.getitem\\nfp8_e4m3 [16, 32]", fillcolor="#FFFFFF", color="#009E73"];
  "convert_element_type_default" [label="convert_element_type_default\\nprims.convert_element_type.default\\nfp8_e4m3 [32, 64]", fillcolor="#56B4E9", color="#009E73"];
  "_scaled_mm_default" [label="_scaled_mm_default\\naten._scaled_mm.default\\nbf16 [16, 64]\\nblocks.0.up output", fillcolor="#009E73", color="#0072B2"];
  "output" [label="output", fillcolor="#FFFFFF", color="#999999"];
  "x" -> "quantize_default" [color="#0072B2"];
  "w" -> "convert_element_type_default" [color="#0072B2"];
  "quantize_default" -> "getitem" [color="#009E73"];
  "getitem" -> "_scaled_mm_default" [color="#009E73"];
  "convert_element_type_default" -> "_scaled_mm_default" [color="#009E73"];
  "_scaled_mm_default" -> "output" [color="#0072B2"];
}
""",  # noqa: E501
    )


def test_dot_of_hostile_names_has_one_statement_a_line_and_escapes_them(tmp_path: Path) -> None:
    graph = hostile_graph()
    write_dot(graph, tmp_path / "graph.dot")
    labels, edges = parse_dot((tmp_path / "graph.dot").read_text(encoding="utf-8"))
    made = to_networkx(graph)
    assert set(labels) == set(made.nodes) and edges == set(made.edges)
    assert labels["]]> &lt; & &amp;"].startswith("]]> &amp;lt; &amp; &amp;amp;\\n")
    assert labels['say "hi"'].startswith('say \\"hi\\"\\n')


def test_dot_of_a_training_step_has_every_node_and_edge(tmp_path: Path) -> None:
    graph = traced_mlp()
    write_dot(graph, tmp_path / "graph.dot")
    labels, edges = parse_dot((tmp_path / "graph.dot").read_text())
    made = to_networkx(graph)
    assert set(labels) == set(made.nodes) and edges == set(made.edges)
