"""One bias-free Linear, forward and backward, through every pass: the graph, the counts and the numbers after each."""

from __future__ import annotations

import expecttest
import pytest
import torch
from graph_text import difference, op_name, ops, render
from joint_graph import (
    JointGraph,
    Step,
    assert_gpu_accepts,
    assert_numbers,
    fp8_product,
    joint_graph,
    make,
    random_inputs,
    run,
    run_passes,
)
from torch import fx, nn


@pytest.fixture(scope="module")
def linear() -> JointGraph:
    return joint_graph(nn.Linear(32, 64, bias=False), torch.randn(8, 32, requires_grad=True))


@pytest.fixture(scope="module")
def on_cpu(linear: JointGraph) -> list[Step]:
    return run_passes(linear, make("cpu"))


@pytest.fixture(scope="module")
def on_gpu(linear: JointGraph) -> list[Step]:
    return run_passes(linear, make("cuda:90"))


def gemms_and_casts(node: fx.Node) -> bool:
    """What carries a matmul: not the arithmetic of a scale, which has a golden test in test_lower_quantizes.py."""
    return op_name(node) in ("mm", "_scaled_mm", "scaled_product", "to", "cast", "bitcast", "clone", "pad")


def test_each_pass_reports_how_many_places_it_changed(on_cpu: list[Step], on_gpu: list[Step]) -> None:
    assert [(step.name, step.changes) for step in on_cpu] == [
        ("before", 0),
        ("RewriteMatmuls", 3),
        ("ShareQuantizes", 3),
        ("LowerQuantizes", 3),
        ("LowerScaledMmForCpu", 3),
    ]
    assert [(step.name, step.changes) for step in on_gpu] == [
        ("before", 0),
        ("RewriteMatmuls", 3),
        ("ShareQuantizes", 3),
        ("LowerQuantizes", 3),
    ]


def test_matmuls_become_fp8_gemms_and_on_the_cpu_calls_of_our_gemm(on_cpu: list[Step], on_gpu: list[Step]) -> None:
    kinds = ("mm", "quantize", "_scaled_mm", "amax", "scaled_mm", "scales", "cast")
    counts = [[ops(step.graph).get(kind, 0) for kind in kinds] for step in on_cpu]
    before_lowering = [[3, 0, 0, 0, 0, 0, 0], [0, 6, 3, 0, 0, 0, 0], [0, 3, 3, 0, 0, 0, 0]]
    assert counts == [*before_lowering, [0, 0, 3, 0, 0, 3, 3], [0, 0, 0, 0, 3, 3, 3]]
    counts = [[ops(step.graph).get(kind, 0) for kind in kinds] for step in on_gpu]
    assert counts == [*before_lowering, [0, 0, 3, 3, 0, 0, 0]]


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_the_numbers_are_those_of_fp8_after_every_pass(on_cpu: list[Step], on_gpu: list[Step], target: str) -> None:
    steps = on_cpu if target == "cpu" else on_gpu
    assert_numbers(steps, lambda weight, x: fp8_product(x, weight.T))


def test_the_graph_before_any_pass_has_the_exact_numbers(linear: JointGraph) -> None:
    weight, x, grad_output = inputs = random_inputs(linear.graph)
    expected = [x @ weight.T, grad_output.T @ x, grad_output @ weight]
    torch.testing.assert_close(run(linear.graph, inputs), expected)


def test_a_gpu_takes_every_gemm_as_it_is_laid_out(on_gpu: list[Step]) -> None:
    assert [assert_gpu_accepts(step.graph) for step in on_gpu] == [0, 3, 3, 3]


def test_golden_before_any_pass(on_cpu: list[Step]) -> None:
    expecttest.assert_expected_inline(render(on_cpu[0].graph), """\
primals_1: f32[64, 32]
primals_2: f32[8, 32]
tangents_1: f32[8, 64]
mm: f32[8, 64] = mm(primals_2, primals_1.T)
mm_1: f32[64, 32] = mm(tangents_1.T, primals_2)
mm_2: f32[8, 32] = mm(tangents_1, primals_1)
return mm, mm_1, mm_2
""")


def test_golden_on_the_cpu_after_rewrite(on_cpu: list[Step]) -> None:
    expecttest.assert_expected_inline(difference(on_cpu[0].graph, on_cpu[1].graph), """\
- mm: f32[8, 64] = mm(primals_2, primals_1.T)
- mm_1: f32[64, 32] = mm(tangents_1.T, primals_2)
- mm_2: f32[8, 32] = mm(tangents_1, primals_1)
- return mm, mm_1, mm_2
+ quantize: (e4m3[8, 32], f32[1, 1]) = quantize(primals_2, e4m3, [-1, -1])
+ quantize_1: (e4m3[64, 32], f32[1, 1]) = quantize(primals_1, e4m3, [-1, -1])
+ _scaled_mm: f32[8, 64] = _scaled_mm(quantize[0], quantize_1[0].T, quantize[1], quantize_1[1].T)
+ quantize_2: (e5m2[8, 64], f32[1, 1]) = quantize(tangents_1, e5m2, [-1, -1])
+ quantize_3: (e4m3[8, 32], f32[1, 1]) = quantize(primals_2, e4m3, [-1, -1])
+ _scaled_mm_1: f32[64, 32] = _scaled_mm(quantize_2[0].T, quantize_3[0], quantize_2[1].T, quantize_3[1])
+ quantize_4: (e5m2[8, 64], f32[1, 1]) = quantize(tangents_1, e5m2, [-1, -1])
+ quantize_5: (e4m3[64, 32], f32[1, 1]) = quantize(primals_1, e4m3, [-1, -1])
+ _scaled_mm_2: f32[8, 32] = _scaled_mm(quantize_4[0], quantize_5[0], quantize_4[1], quantize_5[1])
+ return _scaled_mm, _scaled_mm_1, _scaled_mm_2
""")


def test_golden_on_the_cpu_after_sharing(on_cpu: list[Step]) -> None:
    expecttest.assert_expected_inline(difference(on_cpu[1].graph, on_cpu[2].graph), """\
- quantize_3: (e4m3[8, 32], f32[1, 1]) = quantize(primals_2, e4m3, [-1, -1])
- _scaled_mm_1: f32[64, 32] = _scaled_mm(quantize_2[0].T, quantize_3[0], quantize_2[1].T, quantize_3[1])
+ _scaled_mm_1: f32[64, 32] = _scaled_mm(quantize_2[0].T, quantize[0], quantize_2[1].T, quantize[1])
- quantize_4: (e5m2[8, 64], f32[1, 1]) = quantize(tangents_1, e5m2, [-1, -1])
- quantize_5: (e4m3[64, 32], f32[1, 1]) = quantize(primals_1, e4m3, [-1, -1])
- _scaled_mm_2: f32[8, 32] = _scaled_mm(quantize_4[0], quantize_5[0], quantize_4[1], quantize_5[1])
+ _scaled_mm_2: f32[8, 32] = _scaled_mm(quantize_2[0], quantize_1[0], quantize_2[1], quantize_1[1])
""")


def test_golden_on_the_cpu_after_lowering_quantizes(on_cpu: list[Step]) -> None:
    expecttest.assert_expected_inline(render(on_cpu[3].graph, gemms_and_casts), """\
cast: e4m3[8, 32] = cast(primals_2, quant_scale=scales[0], dtype=e4m3, block=[-1, -1])
cast_1: e4m3[64, 32] = cast(primals_1, quant_scale=scales_1[0], dtype=e4m3, block=[-1, -1])
_scaled_mm: f32[8, 64] = _scaled_mm(cast, cast_1.T, scales[1], scales_1[1].T)
cast_2: e5m2[8, 64] = cast(tangents_1, quant_scale=scales_2[0], dtype=e5m2, block=[-1, -1])
_scaled_mm_1: f32[64, 32] = _scaled_mm(cast_2.T, cast, scales_2[1].T, scales[1])
_scaled_mm_2: f32[8, 32] = _scaled_mm(cast_2, cast_1, scales_2[1], scales_1[1])
return _scaled_mm, _scaled_mm_1, _scaled_mm_2
""")


def test_golden_on_the_cpu_after_lowering_gemms(on_cpu: list[Step]) -> None:
    expecttest.assert_expected_inline(render(on_cpu[4].graph, gemms_and_casts), """\
cast: e4m3[8, 32] = cast(primals_2, quant_scale=scales[0], dtype=e4m3, block=[-1, -1])
cast_1: e4m3[64, 32] = cast(primals_1, quant_scale=scales_1[0], dtype=e4m3, block=[-1, -1])
cast_2: e5m2[8, 64] = cast(tangents_1, quant_scale=scales_2[0], dtype=e5m2, block=[-1, -1])
return scaled_mm, scaled_mm_1, scaled_mm_2
""")


def test_golden_on_a_gpu_after_rewrite(on_cpu: list[Step], on_gpu: list[Step]) -> None:
    expecttest.assert_expected_inline(difference(on_cpu[1].graph, on_gpu[1].graph), """\
- _scaled_mm: f32[8, 64] = _scaled_mm(quantize[0], quantize_1[0].T, quantize[1], quantize_1[1].T)
+ _scaled_mm: f32[8, 64] = _scaled_mm(quantize[0], quantize_1[0].T, quantize[1], quantize_1[1], fast_accum)
+ bitcast: u8[8, 64] = bitcast(quantize_2[0], u8)
+ pad: u8[64, 16] = pad(bitcast.T, [0, 8, 0, 0], 0.0)
+ clone: u8[64, 16] = clone(pad)
+ bitcast_1: e5m2[64, 16] = bitcast(clone, e5m2)
+ bitcast_2: u8[8, 32] = bitcast(quantize_3[0], u8)
+ pad_1: u8[32, 16] = pad(bitcast_2.T, [0, 8, 0, 0], 0.0)
+ clone_1: u8[32, 16] = clone(pad_1)
+ bitcast_3: e4m3[32, 16] = bitcast(clone_1, e4m3)
- _scaled_mm_1: f32[64, 32] = _scaled_mm(quantize_2[0].T, quantize_3[0], quantize_2[1].T, quantize_3[1])
+ _scaled_mm_1: f32[64, 32] = _scaled_mm(bitcast_1, bitcast_3.T, quantize_2[1], quantize_3[1])
+ bitcast_4: u8[64, 32] = bitcast(quantize_5[0], u8)
+ clone_2: u8[32, 64] = clone(bitcast_4.T)
+ bitcast_5: e4m3[32, 64] = bitcast(clone_2, e4m3)
- _scaled_mm_2: f32[8, 32] = _scaled_mm(quantize_4[0], quantize_5[0], quantize_4[1], quantize_5[1])
+ _scaled_mm_2: f32[8, 32] = _scaled_mm(quantize_4[0], bitcast_5.T, quantize_4[1], quantize_5[1])
""")


def test_golden_on_a_gpu_after_sharing(on_gpu: list[Step]) -> None:
    expecttest.assert_expected_inline(difference(on_gpu[1].graph, on_gpu[2].graph), """\
- quantize_3: (e4m3[8, 32], f32[1, 1]) = quantize(primals_2, e4m3, [-1, -1])
- bitcast_2: u8[8, 32] = bitcast(quantize_3[0], u8)
+ bitcast_2: u8[8, 32] = bitcast(quantize[0], u8)
- _scaled_mm_1: f32[64, 32] = _scaled_mm(bitcast_1, bitcast_3.T, quantize_2[1], quantize_3[1])
+ _scaled_mm_1: f32[64, 32] = _scaled_mm(bitcast_1, bitcast_3.T, quantize_2[1], quantize[1])
- quantize_4: (e5m2[8, 64], f32[1, 1]) = quantize(tangents_1, e5m2, [-1, -1])
- quantize_5: (e4m3[64, 32], f32[1, 1]) = quantize(primals_1, e4m3, [-1, -1])
- bitcast_4: u8[64, 32] = bitcast(quantize_5[0], u8)
+ bitcast_4: u8[64, 32] = bitcast(quantize_1[0], u8)
- _scaled_mm_2: f32[8, 32] = _scaled_mm(quantize_4[0], bitcast_5.T, quantize_4[1], quantize_5[1])
+ _scaled_mm_2: f32[8, 32] = _scaled_mm(quantize_2[0], bitcast_5.T, quantize_2[1], quantize_1[1])
""")


def test_golden_on_a_gpu_after_lowering_quantizes(on_gpu: list[Step]) -> None:
    expecttest.assert_expected_inline(difference(on_gpu[2].graph, on_gpu[3].graph, gemms_and_casts), """\
- _scaled_mm: f32[8, 64] = _scaled_mm(quantize[0], quantize_1[0].T, quantize[1], quantize_1[1], fast_accum)
+ to: e4m3[8, 32] = to(clamp_max, e4m3)
+ to_1: e4m3[64, 32] = to(clamp_max_1, e4m3)
+ _scaled_mm: f32[8, 64] = _scaled_mm(to, to_1.T, add, add_1, fast_accum)
+ to_2: e5m2[8, 64] = to(clamp_max_2, e5m2)
- bitcast: u8[8, 64] = bitcast(quantize_2[0], u8)
+ bitcast: u8[8, 64] = bitcast(to_2, u8)
- bitcast_2: u8[8, 32] = bitcast(quantize[0], u8)
+ bitcast_2: u8[8, 32] = bitcast(to, u8)
- _scaled_mm_1: f32[64, 32] = _scaled_mm(bitcast_1, bitcast_3.T, quantize_2[1], quantize[1])
+ _scaled_mm_1: f32[64, 32] = _scaled_mm(bitcast_1, bitcast_3.T, add_2, add)
- bitcast_4: u8[64, 32] = bitcast(quantize_1[0], u8)
+ bitcast_4: u8[64, 32] = bitcast(to_1, u8)
- _scaled_mm_2: f32[8, 32] = _scaled_mm(quantize_2[0], bitcast_5.T, quantize_2[1], quantize_1[1])
+ _scaled_mm_2: f32[8, 32] = _scaled_mm(to_2, bitcast_5.T, add_2, add_1)
""")
