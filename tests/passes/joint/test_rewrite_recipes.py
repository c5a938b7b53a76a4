"""Golden graphs of one Linear under rowwise and blockwise scaling, and with sizes that a GPU wants padded."""

from __future__ import annotations

import expecttest
import pytest
import torch
from graph_text import op_name, ops, render
from joint_graph import Step, assert_gpu_accepts, assert_numbers, fp8_product, joint_graph, make, run_passes
from module_of import ModuleOf
from torch import nn

aten = torch.ops.aten


def steps_of(inputs: int, outputs: int, tokens: int, target: str, recipe: str = "tensorwise") -> list[Step]:
    layer = nn.Linear(inputs, outputs, bias=False)
    return run_passes(joint_graph(layer, torch.randn(tokens, inputs, requires_grad=True)), make(target, recipe=recipe))


def test_rowwise_scales_follow_the_contraction_of_each_gemm() -> None:
    _, rewritten, shared, *_ = steps = steps_of(32, 64, 8, "cpu", "rowwise")
    # Each operand is read along two directions, so nothing is shared.
    assert (rewritten.changes, shared.changes, ops(shared.graph)["quantize"]) == (3, 0, 6)
    assert_numbers(steps, lambda w, x: fp8_product(x, w.T, "rowwise"))
    expecttest.assert_expected_inline(render(shared.graph), """\
primals_1: f32[64, 32]
primals_2: f32[8, 32]
tangents_1: f32[8, 64]
quantize: (e4m3[8, 32], f32[8, 1]) = quantize(primals_2, e4m3, [1, -1])
quantize_1: (e4m3[64, 32], f32[64, 1]) = quantize(primals_1, e4m3, [1, -1])
_scaled_mm: f32[8, 64] = _scaled_mm(quantize[0], quantize_1[0].T, quantize[1], quantize_1[1].T)
quantize_2: (e4m3[8, 64], f32[1, 64]) = quantize(tangents_1, e4m3, [-1, 1])
quantize_3: (e4m3[8, 32], f32[1, 32]) = quantize(primals_2, e4m3, [-1, 1])
_scaled_mm_1: f32[64, 32] = _scaled_mm(quantize_2[0].T, quantize_3[0], quantize_2[1].T, quantize_3[1])
quantize_4: (e4m3[8, 64], f32[8, 1]) = quantize(tangents_1, e4m3, [1, -1])
quantize_5: (e4m3[64, 32], f32[1, 32]) = quantize(primals_1, e4m3, [-1, 1])
_scaled_mm_2: f32[8, 32] = _scaled_mm(quantize_4[0], quantize_5[0], quantize_4[1], quantize_5[1])
return _scaled_mm, _scaled_mm_1, _scaled_mm_2
""")


def test_rowwise_on_a_gpu_writes_bf16_and_lays_scales_out_in_lines() -> None:
    _, rewritten, shared, *_ = steps = steps_of(32, 64, 8, "cuda:90", "rowwise")
    assert (rewritten.changes, shared.changes) == (3, 0)
    assert assert_gpu_accepts(steps[-1].graph) == 3
    assert_numbers(steps, lambda w, x: fp8_product(x, w.T, "rowwise"), tolerance=2.0**-7)
    expecttest.assert_expected_inline(render(shared.graph, lambda node: op_name(node) in ("_scaled_mm", "to")), """\
_scaled_mm: bf16[8, 64] = _scaled_mm(quantize[0], quantize_1[0].T, unsqueeze, unsqueeze_1, fast_accum)
to: f32[8, 64] = to(_scaled_mm, f32)
_scaled_mm_1: bf16[64, 32] = _scaled_mm(bitcast_1, bitcast_3.T, unsqueeze_2, unsqueeze_3)
to_1: f32[64, 32] = to(_scaled_mm_1, f32)
_scaled_mm_2: bf16[8, 32] = _scaled_mm(quantize_4[0], bitcast_5.T, unsqueeze_4, unsqueeze_5)
to_2: f32[8, 32] = to(_scaled_mm_2, f32)
return to, to_1, to_2
""")


def test_blockwise_tiles_the_weight_once_for_both_gemms() -> None:
    _, rewritten, shared, *_ = steps = steps_of(256, 384, 144, "cpu", "blockwise")
    assert (rewritten.changes, shared.changes, ops(shared.graph)["quantize"]) == (3, 1, 5)
    assert_numbers(steps, lambda w, x: fp8_product(x, w.T, "blockwise"), tolerance=1e-4)
    expecttest.assert_expected_inline(render(shared.graph), """\
primals_1: f32[384, 256]
primals_2: f32[144, 256]
tangents_1: f32[144, 384]
quantize: (e4m3[144, 256], f32[144, 2]) = quantize(primals_2, e4m3, [1, 128])
quantize_1: (e4m3[384, 256], f32[3, 2]) = quantize(primals_1, e4m3, [128, 128])
_scaled_mm: f32[144, 384] = _scaled_mm(quantize[0], quantize_1[0].T, quantize[1], quantize_1[1].T)
quantize_2: (e4m3[144, 384], f32[2, 384]) = quantize(tangents_1, e4m3, [128, 1])
quantize_3: (e4m3[144, 256], f32[2, 256]) = quantize(primals_2, e4m3, [128, 1])
_scaled_mm_1: f32[384, 256] = _scaled_mm(quantize_2[0].T, quantize_3[0], quantize_2[1].T, quantize_3[1])
quantize_4: (e4m3[144, 384], f32[144, 3]) = quantize(tangents_1, e4m3, [1, 128])
_scaled_mm_2: f32[144, 256] = _scaled_mm(quantize_4[0], quantize_1[0], quantize_4[1], quantize_1[1])
return _scaled_mm, _scaled_mm_1, _scaled_mm_2
""")


def test_blockwise_scales_on_a_gpu_lie_as_cublas_reads_them() -> None:
    steps = steps_of(256, 384, 144, "cuda:90", "blockwise")
    assert assert_gpu_accepts(steps[-1].graph) == 3
    assert_numbers(steps, lambda w, x: fp8_product(x, w.T, "blockwise"), tolerance=2.0**-6)
    gemms = steps[2].graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    layouts = [[(tuple(arg.meta["val"].shape), arg.meta["val"].stride()) for arg in node.args[2:]] for node in gemms]
    assert layouts == [
        [((144, 2), (1, 144)), ((2, 3), (1, 4))],  # output: rows of x by tiles of w, K fastest, padded to 4
        [((384, 2), (1, 384)), ((2, 256), (256, 1))],  # grad_weight: rows fastest on both sides
        [((144, 3), (1, 144)), ((3, 2), (1, 4))],  # grad_input: tiles of w along N
    ]


def test_odd_sizes_on_a_gpu_are_padded_with_zeros_and_cut_off_again() -> None:
    before, rewritten, shared, *_ = steps = steps_of(100, 120, 5, "cuda:90")
    assert (ops(before.graph)["mm"], rewritten.changes, "mm" in ops(rewritten.graph)) == (3, 3, False)
    assert assert_gpu_accepts(steps[-1].graph) == 3
    assert_numbers(steps, lambda w, x: fp8_product(x, w.T))
    expecttest.assert_expected_inline(render(shared.graph), """\
primals_1: f32[120, 100]
primals_2: f32[5, 100]
tangents_1: f32[5, 120]
quantize: (e4m3[5, 100], f32[1, 1]) = quantize(primals_2, e4m3, [-1, -1])
pad: e4m3[5, 112] = pad(quantize[0], [0, 12, 0, 0], 0.0)
clone: e4m3[5, 112] = clone(pad)
quantize_1: (e4m3[120, 100], f32[1, 1]) = quantize(primals_1, e4m3, [-1, -1])
pad_1: e4m3[128, 112] = pad(quantize_1[0], [0, 12, 0, 8], 0.0)
clone_1: e4m3[128, 112] = clone(pad_1)
_scaled_mm: f32[5, 128] = _scaled_mm(clone, clone_1.T, quantize[1], quantize_1[1], fast_accum)
slice: f32[5, 120]{128, 1} = slice(_scaled_mm, 1, 0, 120)
quantize_2: (e5m2[5, 120], f32[1, 1]) = quantize(tangents_1, e5m2, [-1, -1])
bitcast: u8[5, 120] = bitcast(quantize_2[0], u8)
pad_2: u8[120, 16] = pad(bitcast.T, [0, 11, 0, 0], 0.0)
clone_2: u8[120, 16] = clone(pad_2)
bitcast_1: e5m2[120, 16] = bitcast(clone_2, e5m2)
bitcast_2: u8[5, 100] = bitcast(quantize[0], u8)
pad_3: u8[112, 16] = pad(bitcast_2.T, [0, 11, 0, 12], 0.0)
clone_3: u8[112, 16] = clone(pad_3)
bitcast_3: e4m3[112, 16] = bitcast(clone_3, e4m3)
_scaled_mm_1: f32[120, 112] = _scaled_mm(bitcast_1, bitcast_3.T, quantize_2[1], quantize[1])
slice_1: f32[120, 100]{112, 1} = slice(_scaled_mm_1, 1, 0, 100)
pad_4: e5m2[5, 128] = pad(quantize_2[0], [0, 8, 0, 0], 0.0)
clone_4: e5m2[5, 128] = clone(pad_4)
bitcast_4: u8[120, 100] = bitcast(quantize_1[0], u8)
pad_5: u8[112, 128] = pad(bitcast_4.T, [0, 8, 0, 12], 0.0)
clone_5: u8[112, 128] = clone(pad_5)
bitcast_5: e4m3[112, 128] = bitcast(clone_5, e4m3)
_scaled_mm_2: f32[5, 112] = _scaled_mm(clone_4, bitcast_5.T, quantize_2[1], quantize_1[1])
slice_2: f32[5, 100]{112, 1} = slice(_scaled_mm_2, 1, 0, 100)
return slice, slice_1, slice_2
""")


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_odd_sizes_on_a_gpu_keep_their_numbers_with_many_scales(recipe: str) -> None:
    steps = steps_of(232, 250, 37, "cuda:90", recipe)
    assert steps[1].changes == 3
    assert assert_gpu_accepts(steps[-1].graph) == 3
    assert_numbers(steps, lambda w, x: fp8_product(x, w.T, recipe), tolerance=2.0**-6)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_the_cpu_takes_odd_sizes_without_padding(recipe: str) -> None:
    steps = steps_of(131, 45, 7, "cpu", recipe)
    assert steps[1].changes == 3
    assert "pad" not in ops(steps[2].graph)
    assert_numbers(steps, lambda w, x: fp8_product(x, w.T, recipe), tolerance=1e-4)


def test_a_weight_on_the_left_keeps_its_tiles_on_a_gpu() -> None:
    weight_by_input = ModuleOf(lambda self, x: self.w @ x, w=nn.Parameter(torch.randn(256, 128)))
    joint = joint_graph(weight_by_input, torch.randn(128, 24, requires_grad=True))
    steps = run_passes(joint, make("cuda:90", recipe="blockwise"))
    assert steps[1].changes == 3
    assert assert_gpu_accepts(steps[-1].graph) == 3
    # Tokens are columns here: the same layer on the transposed input, seen in a mirror.
    assert_numbers(steps, lambda w, x: fp8_product(x.T, w.T, "blockwise").T, tolerance=2.0**-6)
