"""Gradients enter a graph multiplied and leave it divided; where an FP8 gemm makes one, its scale does the division."""

from __future__ import annotations

import pytest
import torch
from joint_graph import split
from torch import fx, nn

from fp8_compile.kernels.overflow import largest_magnitude, raise_overflow, raise_overflow_op
from fp8_compile.kernels.record_amax import record_amax_op
from fp8_compile.passes.graph.fp8_gemm import fp8_gemm
from fp8_compile.passes.graph.marks import Kind, mark_of
from fp8_compile.passes.split.flag_overflow_in_place import FlagOverflowInPlace

aten, prims = torch.ops.aten, torch.ops.prims


def backward_of(target: str, recipe: str, dtype: torch.dtype = torch.bfloat16) -> fx.Graph:
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32, bias=False)).to(dtype)
    x = torch.randn(16, 32, dtype=dtype)
    return split(model, x, target=target, recipe=recipe, loss_scale=1024.0).backward


def factors(graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
    """The nodes for the scale and its inverse."""
    chosen = [node for node in graph.find_nodes(op="call_function", target=aten.select.int) if is_factors(node.args[0])]
    by_index = {node.args[2]: node for node in chosen}
    return by_index[0], by_index[1]


def is_factors(node: fx.Node) -> bool:
    return node.op == "placeholder" and tuple(node.meta["val"].shape) == (2,)


def gemm_of(node: fx.Node) -> fx.Node | None:
    while node.op == "call_function" and node.target in (aten.permute.default, aten.view.default):
        node = node.args[0]
    return node if fp8_gemm(node) else None


@pytest.mark.parametrize("target", ["cuda:90", "cuda:100"])
def test_where_one_scale_a_tensor_is_all_the_gemm_divides(target: str) -> None:
    graph = backward_of(target, "tensorwise")
    scale, inverse = factors(graph)
    assert [node.target for node in scale.users] == [aten.mul.Tensor], "one gradient enters"
    results = [node for node in graph.output_node().args[0] if node is not None]
    gemms = [gemm for node in results if (gemm := gemm_of(node))]
    assert len(results) == 3 and len(gemms) == 2, "two weights by gemms, a bias by a sum"
    assert all(inverse in gemm.args[3].args for gemm in gemms)
    assert len(inverse.users) == 3


def test_a_gemm_with_a_scale_a_row_is_followed_by_a_division_in_fp32() -> None:
    graph = backward_of("cuda:90", "rowwise")
    _, inverse = factors(graph)
    assert len(inverse.users) == 3
    for node in inverse.users:
        assert node.meta["val"].dtype == torch.float32
        (cast,) = [user for user in node.users if user.target is prims.convert_element_type.default]
        assert cast.meta["val"].dtype == torch.bfloat16


def test_on_a_gpu_the_flag_is_raised_by_the_kernels_that_make_the_gradients() -> None:
    graph = backward_of("cuda:90", "tensorwise")
    (flag,) = graph.find_nodes(op="call_function", target=raise_overflow_op)
    results = [node for node in graph.output_node().args[0] if node is not None]
    assert FlagOverflowInPlace().run(graph).changes == 1
    graph.eliminate_dead_code()
    graph.lint()
    records = graph.find_nodes(op="call_function", target=record_amax_op)
    assert {node.args[1] for node in records} == set(results) and all(node.args[2] == 0 for node in records)
    assert not [node for node in graph.nodes if mark_of(node).kind is Kind.OVERFLOW]
    assert not graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert flag not in graph.nodes


@pytest.mark.parametrize("worst", [3.0, torch.inf, torch.nan])
def test_the_largest_magnitude_of_all_gradients_is_remembered(worst: float) -> None:
    gradients = [torch.tensor([1.0, -worst]).to(torch.bfloat16), torch.tensor([[0.5]])]
    found = raise_overflow(torch.tensor([2.0]), [largest_magnitude(gradient) for gradient in gradients])
    torch.testing.assert_close(found, torch.tensor([worst]), equal_nan=True)
    again = raise_overflow(found, [largest_magnitude(torch.zeros(3))])
    torch.testing.assert_close(again, found, equal_nan=True)
