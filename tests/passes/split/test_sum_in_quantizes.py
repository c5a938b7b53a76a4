"""Sums over the rows of gradients that are quantized anyway, once the graph is split."""

from __future__ import annotations

from typing import Any, Callable

import expecttest
import pytest
import torch
from graph_text import ops, render
from joint_graph import apply, run
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fp8_compile.kernels.cast_blocks import cast_blocks_op
from fp8_compile.kernels.record_amax import record_amax_op
from fp8_compile.passes.split.sum_in_quantizes import SumInQuantizes


def traced(
    function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32, symbolic: bool = False
) -> fx.Graph:
    """A backward graph of ``function(amaxes, dy)``; ``symbolic``: with any number of rows."""
    rows = DimDynamic.DYNAMIC if symbolic else DimDynamic.STATIC
    sizes = [*(len(shape) - 1) * [rows], DimDynamic.STATIC]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        dy = mode.from_tensor(torch.empty(shape, dtype=dtype), symbolic_context=context)
        graph = make_fx(lambda *args: [function(*args)])(torch.empty(2), dy).graph
    for node in graph.nodes:
        node.meta.setdefault("val", None)
    return graph


def quantized(amaxes: Tensor, dy: Tensor) -> Tensor:
    record_amax_op(amaxes, dy, 0)
    return dy.sum([0], keepdim=True)


def test_golden_of_a_bias() -> None:
    graph = traced(quantized, 192, 48, dtype=torch.bfloat16)
    assert apply(SumInQuantizes(), graph) == 1
    expecttest.assert_expected_inline(
        render(graph),
        """\
arg0_1: f32[2]
arg1_1: bf16[192, 48]
record_amax: None = record_amax(arg0_1, arg1_1, 0)
sum_tiles: f32[3, 48] = sum_tiles(arg1_1)
sum: f32[48] = sum(sum_tiles, [0])
to: bf16[48] = to(sum, bf16)
reshape: bf16[1, 48] = reshape(to, [1, -1])
return reshape
""",
    )


def behind_a_view(amaxes: Tensor, dy: Tensor) -> Tensor:
    record_amax_op(amaxes, dy.view(-1, dy.shape[-1]), 0)
    return dy.sum([0, 1])


def of_what_is_computed(amaxes: Tensor, dy: Tensor) -> Tensor:
    dh = dy * torch.relu(dy)
    record_amax_op(amaxes, dh, 1)
    return dh.sum([-2])


def cast_by_its_own_scale(amaxes: Tensor, dy: Tensor) -> Tensor:
    cast_blocks_op(dy, amaxes[:1, None], torch.float8_e5m2, [-1, -1])
    return dy.sum([0])


def of_shared_heads(amaxes: Tensor, dy: Tensor) -> Tensor:
    dk = dy.view(dy.shape[0], 4, -1).sum(1)  # which Inductor computes element by element
    record_amax_op(amaxes, dk, 1)
    return dk.sum([0])


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "function, shape",
    [
        (quantized, (130, 32)),
        (behind_a_view, (2, 70, 32)),
        (of_what_is_computed, (130, 32)),
        (of_shared_heads, (130, 64)),
        (cast_by_its_own_scale, (130, 32)),
    ],
)
def test_the_sum_is_the_same(function: Callable[..., Any], shape: tuple[int, ...], symbolic: bool) -> None:
    before, after = (traced(function, *shape, symbolic=symbolic) for _ in range(2))
    assert apply(SumInQuantizes(), after) == 1 and ops(after)["sum_tiles"] == 1
    dy = torch.randint(-8, 9, shape).float()  # sums of whole numbers don't depend on their order
    (expected,), (actual,) = (run(graph, [torch.zeros(2), dy]) for graph in (before, after))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def not_quantized(amaxes: Tensor, dy: Tensor) -> Tensor:
    return dy.sum([0])


def over_columns(amaxes: Tensor, dy: Tensor) -> Tensor:
    record_amax_op(amaxes, dy, 0)
    return dy.sum([1])


def over_everything(amaxes: Tensor, dy: Tensor) -> Tensor:
    record_amax_op(amaxes, dy, 0)
    return dy.sum([0, 1])


def cast_by_rows(amaxes: Tensor, dy: Tensor) -> Tensor:
    cast_blocks_op(dy, torch.ones(dy.shape[0], 1), torch.float8_e5m2, [1, -1])
    return dy.sum([0])


def behind_a_norm(amaxes: Tensor, dy: Tensor) -> Tensor:
    dx = dy - torch.var_mean(dy, [1], keepdim=True)[1]
    record_amax_op(amaxes, dx, 0)
    return dx.sum([0])


@pytest.mark.parametrize("function", [not_quantized, over_columns, over_everything, cast_by_rows, behind_a_norm])
def test_other_sums_stay(function: Callable[..., Any]) -> None:
    assert apply(SumInQuantizes(), traced(function, 192, 32)) == 0


def test_the_sum_of_one_tile_stays() -> None:
    assert apply(SumInQuantizes(), traced(quantized, 64, 32)) == 0
