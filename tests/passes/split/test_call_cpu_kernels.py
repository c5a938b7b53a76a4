"""Casts to FP8 become calls of our C++, with the same bits; what is saved in FP8 stays in FP8."""

from __future__ import annotations

import contextlib
import functools

import expecttest
import pytest
import torch
from graph_text import describe, op_name, ops, render
from joint_graph import Split, apply, assert_same_results, copy_graph, random_inputs, split
from module_of import ModuleOf
from torch import Tensor, fx, nn

from fp8_compile.passes.split.call_cpu_kernels import CallCpuKernels
from fp8_compile.passes.split.drop_recompute_copies import DropRecomputeCopies
from fp8_compile.torch_internals import patches

INF, NAN = float("inf"), float("nan")
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Mlp(nn.Module):
    """The second layer's input is saved for backward, as relu's mask is cheaper than what went into relu."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 70, dtype=dtype), nn.Linear(70, 32, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@functools.cache  # nothing below changes them
def halves(recipe: str = "tensorwise", dtype: torch.dtype = torch.float32, plain: bool = False) -> Split:
    """``plain``: the partitioner can't be told that our cast is cheap, and gets plain ops."""
    torch._dynamo.reset()
    with patches.without("cheap_ops") if plain else contextlib.nullcontext():
        x = torch.randn(2, 9, 32, dtype=dtype, requires_grad=True)
        return split(Mlp(dtype), x, target="cpu", recipe=recipe)


def called(graph: fx.Graph) -> tuple[fx.Graph, int]:
    done = copy_graph(graph)
    return done, sum(apply(one, done) for one in (DropRecomputeCopies(), CallCpuKernels()))


def poisoned(graph: fx.Graph, value: float) -> list[Tensor]:
    """Random inputs, the value in one place of each large one, and magnitudes from the subnormal to the huge."""
    inputs = random_inputs(graph)
    for tensor in inputs:
        if tensor.numel() == 1:
            tensor.abs_()  # scales, which are never negative
        if tensor.numel() > 100 and tensor.dtype.is_floating_point and tensor.dtype not in FP8:
            tensor.mul_(torch.logspace(-8, 4, tensor.shape[-1]))
            tensor.view(-1)[17] = value
    return inputs


@pytest.mark.parametrize("recipe, plain", [("tensorwise", False), ("tensorwise", True), ("rowwise", True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_halves_give_the_same_bits(recipe: str, plain: bool, dtype: torch.dtype) -> None:
    made = halves(recipe, dtype, plain)
    for graph in (made.forward, made.backward):
        after, changes = called(graph)
        assert changes > 0
        for value in (1.0, 0.0, INF, -INF, NAN):
            assert_same_results(graph, after, poisoned(graph, value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_is_saved_and_called_whether_the_partitioner_sees_calls_or_plain_ops(dtype: torch.dtype) -> None:
    calls, plain = halves(dtype=dtype), halves(dtype=dtype, plain=True)
    kept = [sorted(describe(node.meta["val"]) for node in made.saved) for made in (calls, plain)]
    assert kept[0] == kept[1]
    for one, other in ((calls.forward, plain.forward), (calls.backward, plain.backward)):
        assert ops(called(one)[0]) == ops(called(other)[0])
        assert len(one.nodes) < len(other.nodes)


def test_no_cast_and_no_reduction_is_left_to_inductor() -> None:
    made = halves(plain=True)
    for graph in (made.forward, made.backward):
        assert {"to", "amax", "clamp_max"} <= set(ops(graph))
        after, _ = called(graph)
        assert not {"to", "amax", "clamp_max", "reciprocal"} & set(ops(after))
        assert ops(after)["scaled_mm"] == ops(graph)["scaled_mm"]


def test_a_tensor_that_is_saved_in_fp8_stays_in_fp8() -> None:
    made = halves()
    after, _ = called(made.forward)
    before_types, after_types = (
        [node.meta["val"].dtype for node in graph.output_node().args[0]] for graph in (made.forward, after)
    )
    assert before_types == after_types
    assert after_types.count(torch.float8_e4m3fn) == 2
    saved = [node for node in after.output_node().args[0] if node.meta["val"].dtype in FP8]
    assert {op_name(node.args[0]) for node in saved} == {"quantize"}


def test_each_tensor_is_cast_once_in_each_half() -> None:
    """Forward casts two inputs and two weights; backward two gradients, and the weights again, which are not saved."""
    made = halves()
    forward, backward = called(made.forward)[0], called(made.backward)[0]
    assert (ops(forward)["quantize"], ops(backward)["quantize"]) == (2, 2)
    assert (ops(forward)["cast"], ops(backward)["cast"]) == (2, 2), "by scales that backward needs, and that it has"


def test_golden_of_a_forward_graph() -> None:
    expecttest.assert_expected_inline(render(called(halves().forward)[0]), """\
primals_1: f32[70, 32]
primals_2: f32[70]
primals_3: f32[2, 9, 32]
primals_4: f32[32, 70]
view: f32[18, 32] = view(primals_3, [18, 32])
quantize: (e4m3[18, 32], f32[1, 1]) = quantize(view, e4m3, [-1, -1])
scales: (f32[1, 1], f32[1, 1]) = scales(primals_1, e4m3, [-1, -1])
cast: e4m3[70, 32] = cast(primals_1, scales[0], e4m3, [-1, -1])
scaled_mm: f32[18, 70] = scaled_mm(quantize[0], cast.T, quantize[1], scales[1].T, primals_2, f32)
view_1: f32[2, 9, 70] = view(scaled_mm, [2, 9, 70])
relu: f32[2, 9, 70] = relu(view_1)
view_2: f32[18, 70] = view(relu, [18, 70])
quantize_1: (e4m3[18, 70], f32[1, 1]) = quantize(view_2, e4m3, [-1, -1])
scales_1: (f32[1, 1], f32[1, 1]) = scales(primals_4, e4m3, [-1, -1])
cast_1: e4m3[32, 70] = cast(primals_4, scales_1[0], e4m3, [-1, -1])
scaled_mm_1: f32[18, 32] = scaled_mm(quantize_1[0], cast_1.T, quantize_1[1], scales_1[1].T, None, f32)
view_3: f32[2, 9, 32] = view(scaled_mm_1, [2, 9, 32])
le: b8[2, 9, 70] = le(relu, 0)
return view_3, primals_1, primals_4, quantize[1], quantize[0], scales[0], scales[1], quantize_1[1], quantize_1[0],
    scales_1[0], scales_1[1], le
""")


def test_golden_of_a_backward_graph() -> None:
    expecttest.assert_expected_inline(render(called(halves().backward)[0]), """\
primals_1: f32[70, 32]
primals_4: f32[32, 70]
getitem_25: f32[1, 1]
cast_default: e4m3[18, 32]
getitem_26: f32[1, 1]
getitem_27: f32[1, 1]
getitem_29: f32[1, 1]
cast_default_2: e4m3[18, 70]
getitem_30: f32[1, 1]
getitem_31: f32[1, 1]
le: b8[2, 9, 70]
tangents_1: f32[2, 9, 32]
view: f32[18, 32] = view(tangents_1, [18, 32])
quantize: (e5m2[18, 32], f32[1, 1]) = quantize(view, e5m2, [-1, -1])
scaled_mm: f32[32, 70] = scaled_mm(quantize[0].T, cast_default_2, quantize[1].T, getitem_29, None, f32)
cast: e4m3[32, 70] = cast(primals_4, getitem_30, e4m3, [-1, -1])
scaled_mm_1: f32[18, 70] = scaled_mm(quantize[0], cast, quantize[1], getitem_31, None, f32)
view_1: f32[2, 9, 70] = view(scaled_mm_1, [2, 9, 70])
full: f32[] = full([], 0.0, dtype=f32, layout=torch.strided, device=cpu)
where: f32[2, 9, 70] = where(le, full, view_1)
view_2: f32[18, 70] = view(where, [18, 70])
quantize_1: (e5m2[18, 70], f32[1, 1]) = quantize(view_2, e5m2, [-1, -1])
cast_1: e4m3[70, 32] = cast(primals_1, getitem_26, e4m3, [-1, -1])
scaled_mm_2: f32[18, 32] = scaled_mm(quantize_1[0], cast_1, quantize_1[1], getitem_27, None, f32)
scaled_mm_3: f32[70, 32] = scaled_mm(quantize_1[0].T, cast_default, quantize_1[1].T, getitem_25, None, f32)
sum: f32[1, 70] = sum(view_2, [0], True)
view_3: f32[70] = view(sum, [70])
view_4: f32[2, 9, 32] = view(scaled_mm_2, [2, 9, 32])
return scaled_mm_3, view_3, view_4, scaled_mm
""")


def test_blocks_of_tiles_are_left_to_inductor() -> None:
    made = halves("blockwise")
    for graph in (made.forward, made.backward):
        after, _ = called(graph)
        assert not {"cast", "scales"} & set(ops(after))
        assert ops(after)["amax"] == ops(graph)["amax"]
        assert_same_results(graph, after, poisoned(graph, NAN))


def test_symbolic_sizes_give_the_same_bits() -> None:
    made = split(Mlp(), torch.randn(2, 9, 32, requires_grad=True), target="cpu", dynamic=True)
    for graph in (made.forward, made.backward):
        after, changes = called(graph)
        assert changes > 0
        assert_same_results(graph, after, random_inputs(graph))


def test_a_cast_of_the_users_own_is_left_alone() -> None:
    def rounded(self: ModuleOf, x: Tensor) -> Tensor:
        return self.layer(x).to(torch.float8_e4m3fn).to(torch.float32) * x

    model = ModuleOf(rounded, layer=nn.Linear(32, 32, bias=False))
    made = split(model, torch.randn(2, 9, 32, requires_grad=True), target="cpu")
    after, _ = called(made.forward)
    assert ops(after)["to"] == 2
    assert_same_results(made.forward, after, random_inputs(made.forward))
