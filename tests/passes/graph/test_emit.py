"""Nodes are made with their value and their metadata together."""

from __future__ import annotations

import pytest
import torch
from graph_text import op_name, render
from joint_graph import joint_graph, run
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from fp8_compile.passes.graph.emit import INHERITED, NEVER_SAVED, emit, getitem, inline
from fp8_compile.passes.graph.marks import KEY, Kind, Mark, mark_of

aten, prims = torch.ops.aten, torch.ops.prims


def graph_of(*shape: int, dtype: torch.dtype = torch.bfloat16, dynamic: bool = False) -> tuple[fx.Graph, fx.Node]:
    """A graph with one input of that shape."""
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None, static_shapes=not dynamic)
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = mode.from_tensor(torch.empty(shape, dtype=dtype))
    return graph, x


def test_the_value_of_a_node_is_computed() -> None:
    graph, x = graph_of(8, 32)
    turned = emit(graph, aten.permute.default, x, [1, 0], like=x)
    cast = emit(graph, prims.convert_element_type.default, turned, torch.float32, like=x)
    assert isinstance(cast.meta["val"], FakeTensor)
    assert (tuple(cast.meta["val"].shape), cast.meta["val"].stride(), cast.meta["val"].dtype) == (
        (32, 8),
        (1, 32),
        torch.float32,
    )


def test_a_node_inherits_what_belongs_to_its_place_and_nothing_else() -> None:
    graph, x = graph_of(8, 32)
    mine = {key: f"the {key}" for key in INHERITED}
    x.meta.update(mine, partitioner_tag="is_backward", desc="an input", original_aten="mm")
    matmul = {"site": "mm_1", "module": "up", "gemm": "grad_input"}
    x.meta[KEY] = Mark(**matmul, kind=Kind.GEMM, saved=True)
    node = emit(graph, aten.sin.default, x, like=x)
    assert {key: value for key, value in node.meta.items() if key != "val"} == {**mine, KEY: Mark(**matmul)}
    assert {"nn_module_stack", "fwd_nn_module_stack", "seq_nr", "recompute", "ac_graph_id"} <= set(INHERITED)


def test_tags_are_added_and_win_over_what_is_inherited() -> None:
    graph, x = graph_of(8, 32)
    x.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    node = emit(graph, aten.sin.default, x, like=x, mark=Mark(kind=Kind.CAST), tags=NEVER_SAVED)
    assert (node.meta["recompute"], mark_of(node).kind) == (CheckpointPolicy.MUST_RECOMPUTE, Kind.CAST)
    assert x.meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE
    assert NEVER_SAVED == {"recompute": CheckpointPolicy.MUST_RECOMPUTE}


def test_a_node_is_put_where_the_graph_is_inserting() -> None:
    graph, x = graph_of(8, 32)
    last = emit(graph, aten.cos.default, x, like=x)
    with graph.inserting_before(last):
        first = emit(graph, aten.sin.default, x, like=x)
    assert list(graph.nodes) == [x, first, last]


def test_keyword_arguments_reach_the_node_and_its_value() -> None:
    graph, x = graph_of(8, 32)
    node = emit(graph, aten.sum.dim_IntList, x, [1], True, like=x, dtype=torch.float32)
    assert node.kwargs == {"dtype": torch.float32}
    assert (tuple(node.meta["val"].shape), node.meta["val"].dtype) == ((8, 1), torch.float32)


def test_one_result_of_several_has_its_own_value() -> None:
    graph, x = graph_of(8, 32)
    both = emit(graph, aten.max.dim, x, 1, like=x)
    assert [getitem(graph, both, index).meta["val"].dtype for index in (0, 1)] == [torch.bfloat16, torch.int64]


def scaled(x: Tensor, factor: float, y: Tensor) -> tuple[Tensor, Tensor]:
    """Something that Inductor decomposes (clamp) and something that it does not."""
    return (x * factor).clamp(-1, 1), x @ y


def test_inline_copies_the_operations_of_a_function_decomposed() -> None:
    graph, x = graph_of(8, 8, dtype=torch.float32)
    x.meta["seq_nr"] = 7
    results = inline(graph, scaled, x, 3.0, x, like=x, mark=Mark(kind=Kind.CAST))
    graph.output(list(results))
    graph.lint()
    assert render(graph).splitlines() == [
        "x: f32[8, 8]",
        "mul: f32[8, 8] = mul(x, 3.0)",
        "clamp_min: f32[8, 8] = clamp_min(mul, -1)",
        "clamp_max: f32[8, 8] = clamp_max(clamp_min, 1)",
        "mm: f32[8, 8] = mm(x, x)",
        "return clamp_max, mm",
    ]
    made = [node for node in graph.nodes if node.op == "call_function"]
    assert {(node.meta["seq_nr"], mark_of(node).kind) for node in made} == {(7, Kind.CAST)}
    data = torch.randn(8, 8)
    torch.testing.assert_close(run(graph, [data]), list(scaled(data, 3.0, data)))


def test_inline_gives_back_an_argument_that_the_function_returns() -> None:
    graph, x = graph_of(8, 8)
    assert inline(graph, lambda x: x, x, like=x) is x
    assert list(graph.nodes) == [x]


def test_inline_refuses_a_function_that_holds_a_tensor() -> None:
    graph, x = graph_of(2, dtype=torch.float32)
    with pytest.raises(AssertionError, match="plus_pi left a get_attr node _tensor_constant0 that can't be inlined"):
        inline(graph, plus_pi, x, like=x)


def plus_pi(x: Tensor) -> Tensor:
    return x + torch.tensor([3.0, 14.0])


def test_inline_keeps_symbolic_sizes_symbolic() -> None:
    def padded(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 16))

    joint = joint_graph(nn.Linear(32, 32, bias=False), torch.randn(5, 32, requires_grad=True), dynamic=True)
    graph = joint.copy()
    (mm, *_) = [node for node in graph.nodes if op_name(node) == "mm"]
    with graph.inserting_before(mm):
        result = inline(graph, padded, mm.args[0], like=mm)
    graph.lint()
    rows = result.meta["val"].shape[0]
    assert isinstance(rows, torch.SymInt)
    assert rows.node.shape_env is mm.meta["val"].shape[0].node.shape_env
    sizes = [arg for node in graph.nodes if op_name(node) == "pad" for arg in node.args[1]]
    assert any(isinstance(size, fx.Node) for size in sizes)
