"""A quantize node becomes the ops of its formula, with the same bits."""

from __future__ import annotations

import expecttest
import pytest
import torch
from graph_text import ops, render
from joint_graph import apply, run
from torch import fx
from torch._subclasses import FakeTensorMode

from fp8_compile.kernels.quantize import quantize_op
from fp8_compile.passes.graph.emit import emit, getitem
from fp8_compile.passes.graph.marks import mark_of, set_mark
from fp8_compile.passes.joint.lower_quantizes import LowerQuantizes

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = float("inf"), float("nan")


def quantized(*shape: int, dtype: torch.dtype, to: torch.dtype, block: tuple[int, int], results: int = 2) -> fx.Graph:
    """A graph that quantizes its input and returns the first ``results`` of values and scales."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(val=FakeTensorMode().from_tensor(torch.empty(shape, dtype=dtype)), seq_nr=7)
    set_mark(x, module="layer")
    node = emit(graph, quantize_op, x, to, list(block), like=x)
    graph.output([getitem(graph, node, index) for index in range(results)])
    return graph


def test_golden_of_one_scale_a_tensor() -> None:
    graph = quantized(8, 32, dtype=torch.bfloat16, to=E4M3, block=(-1, -1))
    assert (ops(graph)["quantize"], apply(LowerQuantizes(), graph), "quantize" in ops(graph)) == (1, 1, False)
    expecttest.assert_expected_inline(render(graph), """\
x: bf16[8, 32]
abs: bf16[8, 32] = abs(x)
amax: bf16[1, 1] = amax(abs, [0, 1], True)
to: f32[1, 1] = to(amax, f32)
clamp_min: f32[1, 1] = clamp_min(to, 1e-12)
reciprocal: f32[1, 1] = reciprocal(clamp_min)
mul: f32[1, 1] = mul(reciprocal, 448.0)
reciprocal_1: f32[1, 1] = reciprocal(mul)
mul_1: f32[1, 1] = mul(clamp_min, 0.0)
add: f32[1, 1] = add(reciprocal_1, mul_1)
to_1: f32[8, 32] = to(x, f32)
mul_2: f32[8, 32] = mul(to_1, mul)
clamp_min_1: f32[8, 32] = clamp_min(mul_2, -448.0)
clamp_max: f32[8, 32] = clamp_max(clamp_min_1, 448.0)
to_2: e4m3[8, 32] = to(clamp_max, e4m3)
return to_2, add
""")


def test_golden_of_a_scale_a_block() -> None:
    graph = quantized(8, 300, dtype=torch.float32, to=E5M2, block=(1, 128))
    assert apply(LowerQuantizes(), graph) == 1
    expecttest.assert_expected_inline(render(graph), """\
x: f32[8, 300]
abs: f32[8, 300] = abs(x)
pad: f32[8, 384] = pad(abs, [0, 84, 0, 0], 0.0)
view: f32[8, 1, 3, 128] = view(pad, [8, 1, 3, 128])
amax: f32[8, 3] = amax(view, [1, 3])
clamp_min: f32[8, 3] = clamp_min(amax, 1e-12)
reciprocal: f32[8, 3] = reciprocal(clamp_min)
mul: f32[8, 3] = mul(reciprocal, 57344.0)
reciprocal_1: f32[8, 3] = reciprocal(mul)
mul_1: f32[8, 3] = mul(clamp_min, 0.0)
add: f32[8, 3] = add(reciprocal_1, mul_1)
unsqueeze: f32[8, 1, 3] = unsqueeze(mul, 1)
unsqueeze_1: f32[8, 1, 3, 1] = unsqueeze(unsqueeze, 3)
expand: f32[8, 1, 3, 128]{3, 3, 1, 0} = expand(unsqueeze_1, [8, 1, 3, 128])
clone: f32[8, 1, 3, 128] = clone(expand)
view_1: f32[8, 384] = view(clone, [8, 384])
slice: f32[8, 300]{384, 1} = slice(view_1, 1, 0, 300)
mul_2: f32[8, 300] = mul(x, slice)
clamp_min_1: f32[8, 300] = clamp_min(mul_2, -57344.0)
clamp_max: f32[8, 300] = clamp_max(clamp_min_1, 57344.0)
to: e5m2[8, 300] = to(clamp_max, e5m2)
return to, add
""")


def codes(q: torch.Tensor) -> torch.Tensor:
    """A NaN is one, whatever its sign: the operation in C++ writes only the positive one."""
    return torch.where(q.to(torch.float32).isnan(), 0xFF, q.view(torch.uint8))


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 1), (128, 128)], ids=str)
@pytest.mark.parametrize("to", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ops_give_the_bits_of_the_node(dtype: torch.dtype, to: torch.dtype, block: tuple[int, int]) -> None:
    before = quantized(130, 257, dtype=dtype, to=to, block=block)
    after = quantized(130, 257, dtype=dtype, to=to, block=block)
    apply(LowerQuantizes(), after)
    x = torch.randn(130, 257) * torch.logspace(-6, 6, 257)
    x[0, :200], x[5, 7], x[6, 8], x[7, 9] = 0.0, INF, -INF, NAN
    (q, scale), (lowered_q, lowered_scale) = run(before, [x.to(dtype)]), run(after, [x.to(dtype)])
    assert torch.equal(codes(q), codes(lowered_q))
    assert torch.equal(scale.nan_to_num(-1.0), lowered_scale.nan_to_num(-1.0))
    assert scale.isnan().any() and scale.isnan().all() == (block == (-1, -1))


def test_the_ops_belong_to_the_gemm_that_the_node_belonged_to() -> None:
    graph = quantized(8, 32, dtype=torch.float32, to=E4M3, block=(-1, -1))
    apply(LowerQuantizes(), graph)
    made = [node for node in graph.nodes if node.op == "call_function"]
    assert {(node.meta["seq_nr"], mark_of(node).module) for node in made} == {(7, "layer")}


def test_a_graph_without_quantizes_is_left_alone() -> None:
    graph = fx.Graph()
    graph.output([graph.placeholder("x")])
    assert LowerQuantizes().run(graph).changes == 0


def test_scales_that_nothing_reads_are_not_computed() -> None:
    graph = quantized(8, 32, dtype=torch.float32, to=E4M3, block=(-1, -1), results=1)
    apply(LowerQuantizes(), graph)
    assert ops(graph) == {"abs": 1, "amax": 1, "clamp_min": 2, "reciprocal": 1, "mul": 2, "clamp_max": 1, "to": 1}
