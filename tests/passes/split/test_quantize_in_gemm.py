"""A gemm quantizes what it alone reads, with the same bits."""

from __future__ import annotations

import expecttest
import pytest
import torch
from graph_text import op_name, ops, render
from joint_graph import apply, assert_same_results, copy_graph, joint_graph, make, random_inputs, run, split
from torch import Tensor, fx, nn

import fp8_compile
from fp8_compile.kernels.cpu.quantize_mm import quantize_delayed_mm_op
from fp8_compile.passes.pipeline import JointPipeline
from fp8_compile.passes.split.call_cpu_kernels import CallCpuKernels
from fp8_compile.passes.split.fuse_delayed_quantizes import FuseDelayedQuantizes
from fp8_compile.passes.split.quantize_in_gemm import QuantizeInGemm


class Attention(nn.Module):
    """The input of two layers is quantized for both."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = nn.Linear(32, 48), nn.Linear(32, 48, bias=False), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.query(x) * self.key(x))


def inference(model: nn.Module, recipe: str = "tensorwise", dtype: torch.dtype = torch.float32) -> fx.Graph:
    """The graph of a forward without gradients, before the pass."""
    model = model.to(dtype).requires_grad_(False)
    joint = joint_graph(model, torch.randn(5, 32, dtype=dtype))
    graph = joint.copy()
    JointPipeline(make("cpu", recipe=recipe), joint.names, key="")(graph)
    apply(CallCpuKernels(), graph)
    return graph


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_the_same(recipe: str, dtype: torch.dtype) -> None:
    graph = inference(Attention(), recipe, dtype)
    after = copy_graph(graph)
    assert apply(QuantizeInGemm(), after) == 1
    for seed in range(3):
        assert_same_results(graph, after, random_inputs(graph, seed))


def test_golden_of_layers_that_share_their_input_and_of_one_that_does_not() -> None:
    graph = inference(Attention())
    apply(QuantizeInGemm(), graph)
    expecttest.assert_expected_inline(render(graph), """\
arg0_1: f32[48, 32]
arg1_1: f32[48]
arg2_1: f32[5, 32]
arg3_1: f32[48, 32]
arg4_1: f32[16, 48]
arg5_1: f32[16]
quantize: (e4m3[5, 32], f32[1, 1]) = quantize(arg2_1, e4m3, [-1, -1])
quantize_1: (e4m3[48, 32], f32[1, 1]) = quantize(arg0_1, e4m3, [-1, -1])
scaled_mm: f32[5, 48] = scaled_mm(quantize[0], quantize_1[0].T, quantize[1], quantize_1[1].T, arg1_1, f32)
quantize_2: (e4m3[48, 32], f32[1, 1]) = quantize(arg3_1, e4m3, [-1, -1])
scaled_mm_1: f32[5, 48] = scaled_mm(quantize[0], quantize_2[0].T, quantize[1], quantize_2[1].T, None, f32)
mul: f32[5, 48] = mul(scaled_mm, scaled_mm_1)
quantize_mm: f32[5, 16] = quantize_mm(mul, None, arg4_1, None, arg5_1, False, False)
return quantize_mm
""")


@pytest.mark.parametrize("static", [False, True])
def test_inputs_of_packed_weights_are_quantized_by_the_gemm(static: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    batches = [torch.randn(5, 32) for _ in range(2)]
    calibration = fp8_compile.calibrate(model, batches, hessians=False) if static else None
    fp8_compile.pack(model, format="fp8", activations="fp8", calibration=calibration, progress=False)
    graph = inference(model)
    after = copy_graph(graph)
    assert apply(QuantizeInGemm(), after) == 2
    assert ops(after)["quantize_mm"] == 2 and not {"quantize_inputs", "scaled_mm"} & set(ops(after))
    assert_same_results(graph, after, random_inputs(graph))


def test_a_delayed_quantize_is_part_of_the_gemm_and_its_amax_is_recorded() -> None:
    options = {"recipe": "delayed", "quantize_gradients": False, "target": "cpu"}
    graph = split(Attention(), torch.randn(5, 32), **options).forward
    for one in (CallCpuKernels(), FuseDelayedQuantizes()):
        apply(one, graph)
    after = copy_graph(graph)
    assert apply(QuantizeInGemm(), after) == 1, "two layers share their input"
    (call,) = after.find_nodes(op="call_function", target=quantize_delayed_mm_op)
    assert {op_name(user) for result in call.users for user in result.users} >= {"record_amaxes"}
    assert ops(after)["quantize_delayed"] == ops(graph)["quantize_delayed"] - 1
    before, state = random_inputs(graph), random_inputs(graph)  # each run writes to its own
    for one, other in zip([*run(graph, before), *before], [*run(after, state), *state], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_what_backward_reads_is_quantized_as_before() -> None:
    made = split(Attention(), torch.randn(5, 32), target="cpu", recipe="tensorwise")
    for graph in (made.forward, made.backward):
        apply(CallCpuKernels(), graph)
        assert apply(QuantizeInGemm(), graph) == 0


def test_tiles_are_left_to_inductor() -> None:
    assert apply(QuantizeInGemm(), inference(Attention(), "blockwise")) == 0
