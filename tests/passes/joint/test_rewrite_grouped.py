"""Layers of experts: golden graphs of the rewrite, and its numbers against FP64 for every kind of groups."""

from __future__ import annotations

import dataclasses
import functools

import expecttest
import grouped
import numpy as np
import pytest
import torch
from fp8_reference import E4M3, Noise
from graph_text import op_name, render
from grouped import Experts, Layer, offsets_of
from joint_graph import JointGraph, assert_gpu_accepts, joint_graph, make, random_inputs, run, run_passes
from torch import Tensor, fx, nn

from fp8_compile.kernels.mxfp8 import dequantize_mx, quantize_mx
from fp8_compile.passes.graph.marks import mark_of

EXPERTS, K, N, TOKENS = 4, 32, 48, 24
OFFSETS = offsets_of(7, 0, 16, 1)
GROUPS = {"ragged": (7, 0, 16, 1), "all in one": (0, 24, 0, 0), "with a rest": (3, 4, 5, 6), "no tokens": (0, 0, 0, 0)}


@functools.cache  # passes work on copies
def joint_of(dtype: torch.dtype = torch.float32, *, transposed: bool = True) -> JointGraph:
    torch.manual_seed(0)
    layer = Layer(EXPERTS, K, N, transposed=transposed, dtype=dtype)
    return joint_graph(layer, torch.randn(TOKENS, K, dtype=dtype, requires_grad=True), OFFSETS)


@dataclasses.dataclass
class Given:
    """Random inputs of a graph of ``Layer``."""

    inputs: list[Tensor]
    transposed: bool

    @classmethod
    def of(cls, graph: fx.Graph, offsets: Tensor = OFFSETS, *, transposed: bool = True) -> Given:
        given = [offsets if t.dtype == torch.int32 else t for t in random_inputs(graph)]
        return cls(given, transposed)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, w as [experts, K, N], offsets and dy."""
        x = next(t for t in self.inputs if t.shape == (TOKENS, K))
        w = next(t for t in self.inputs if t.dim() == 3)
        offsets = next(t for t in self.inputs if t.dtype == torch.int32)
        return x, w.transpose(1, 2) if self.transposed else w, offsets, self.inputs[-1]


def gemms_and_quantizes(node: fx.Node) -> bool:
    return op_name(node) in ("quantize", "scaled_grouped_mm", "_scaled_grouped_mm", "_grouped_mm", "view", "permute")


def numbers(graph: fx.Graph, given: Given) -> dict[str, np.ndarray]:
    """The graph's results by name. The weight comes first or second, as Dynamo met it."""
    floating = [t for t in given.inputs[:-1] if t.is_floating_point()]
    names = ["output", *("grad_weight" if t.dim() == 3 else "grad_input" for t in floating)]
    results = (t for t in run(graph, given.inputs) if t is not None)
    found = {name: t.double() for name, t in zip(names, results, strict=True)}
    if given.transposed:
        found["grad_weight"] = found["grad_weight"].transpose(1, 2)
    return {name: t.numpy() for name, t in found.items()}


def test_a_stack_of_experts_is_quantized_as_one_tensor_and_read_by_forward_and_backward() -> None:
    steps = run_passes(joint_of(torch.bfloat16), make("cpu"))
    assert (steps[1].changes, steps[2].changes) == (3, 3)
    expecttest.assert_expected_inline(render(steps[2].graph, gemms_and_quantizes), """\
quantize: (e4m3[24, 32], f32[1, 1]) = quantize(primals_2, e4m3, [-1, -1])
view: bf16[192, 32] = view(primals_1, [-1, 32])
quantize_1: (e4m3[192, 32], f32[1, 1]) = quantize(view, e4m3, [-1, -1])
view_1: e4m3[4, 48, 32] = view(quantize_1[0], [4, 48, 32])
permute: e4m3[4, 32, 48]{1536, 1, 32} = permute(view_1, [0, 2, 1])
scaled_grouped_mm: bf16[24, 48] = scaled_grouped_mm(quantize[0], permute, primals_3, quantize[1], quantize_1[1],
    bf16)
quantize_2: (e5m2[24, 48], f32[1, 1]) = quantize(tangents_1, e5m2, [-1, -1])
scaled_grouped_mm_1: bf16[4, 48, 32] = scaled_grouped_mm(quantize_2[0].T, quantize[0], primals_3, quantize_2[1].T,
    quantize[1], bf16)
permute_1: bf16[4, 32, 48]{1536, 1, 32} = permute(scaled_grouped_mm_1, [0, 2, 1])
scaled_grouped_mm_2: bf16[24, 32] = scaled_grouped_mm(quantize_2[0], view_1, primals_3, quantize_2[1],
    quantize_1[1], bf16)
permute_2: bf16[4, 48, 32] = permute(permute_1, [0, 2, 1])
return scaled_grouped_mm, permute_2, scaled_grouped_mm_2, None
""")


def test_both_gradients_of_hugging_faces_own_operation_become_gemms_of_their_own() -> None:
    steps = run_passes(joint_of(torch.float32), make("cpu"))
    assert (steps[1].changes, steps[2].changes) == (3, 3)
    assert not any("fallback" in op_name(node) for node in steps[1].graph.nodes)
    expecttest.assert_expected_inline(render(steps[2].graph, gemms_and_quantizes), """\
quantize: (e4m3[24, 32], f32[1, 1]) = quantize(primals_2, e4m3, [-1, -1])
view: f32[192, 32] = view(primals_1, [-1, 32])
quantize_1: (e4m3[192, 32], f32[1, 1]) = quantize(view, e4m3, [-1, -1])
view_1: e4m3[4, 48, 32] = view(quantize_1[0], [4, 48, 32])
permute: e4m3[4, 32, 48]{1536, 1, 32} = permute(view_1, [0, 2, 1])
scaled_grouped_mm: f32[24, 48] = scaled_grouped_mm(quantize[0], permute, primals_3, quantize[1], quantize_1[1], f32)
quantize_2: (e5m2[24, 48], f32[1, 1]) = quantize(tangents_1, e5m2, [-1, -1])
scaled_grouped_mm_1: f32[24, 32] = scaled_grouped_mm(quantize_2[0], view_1, primals_3, quantize_2[1], quantize_1[1],
    f32)
scaled_grouped_mm_2: f32[4, 48, 32] = scaled_grouped_mm(quantize_2[0].T, quantize[0], primals_3, quantize_2[1].T,
    quantize[1], f32)
permute_1: f32[4, 32, 48]{1536, 1, 32} = permute(scaled_grouped_mm_2, [0, 2, 1])
permute_2: f32[4, 48, 32] = permute(permute_1, [0, 2, 1])
return scaled_grouped_mm, permute_2, scaled_grouped_mm_1, None
""")


@pytest.mark.parametrize("transposed", [True, False], ids=["kept as [E, N, K]", "kept as [E, K, N]"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_all_three_gemms_are_those_of_rounded_operands_in_fp64(
    dtype: torch.dtype, recipe: str, transposed: bool
) -> None:
    steps = run_passes(joint_of(dtype, transposed=transposed), make("cpu", recipe=recipe))
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    for sizes in GROUPS.values():
        given = Given.of(steps[0].graph, offsets_of(*sizes), transposed=transposed)
        expected = grouped.in_fp8(*given.operands, recipe)
        for step in (steps[1], steps[-1]):
            found = numbers(step.graph, given)
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=rounding, atol=rounding, err_msg=f"{name} {sizes}")


def test_the_error_is_that_of_fp8() -> None:
    steps = run_passes(joint_of(), make("cpu"))
    given = Given.of(steps[0].graph)
    exact = grouped.exact(*given.operands)
    found = Noise(numbers(steps[-1].graph, given), exact)
    found.check(Noise(grouped.in_fp8(*given.operands), exact))
    assert min(found.snr_db().values()) > 20


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_what_is_not_finite_in_one_token_reaches_its_results(poison: float, recipe: str) -> None:
    graph = run_passes(joint_of(), make("cpu", recipe=recipe))[-1].graph
    given = Given.of(graph)
    given.operands[0][9, 5] = poison  # the third expert's
    found = numbers(graph, given)
    assert not np.isfinite(found["output"][9]).any()
    assert not np.isfinite(found["grad_weight"][2, 5]).any()
    assert np.isfinite(found["grad_input"]).all()
    if recipe == "rowwise":
        assert np.isfinite(np.delete(found["output"], 9, 0)).all()


def test_only_what_the_switches_leave_is_rewritten_and_the_other_gradient_stays_where_it_was() -> None:
    graph = run_passes(joint_of(), make("cpu", quantize_weights=False))[1].graph
    left = [op_name(node) for node in graph.nodes if "grouped_mm" in op_name(node)]
    assert left == ["grouped_mm_fallback", "grouped_mm_fallback_backward", "scaled_grouped_mm"]
    assert [mark_of(node).gemm for node in graph.nodes if op_name(node) == "scaled_grouped_mm"] == ["grad_weight"]


class Chain(nn.Module):
    """Two layers with nothing between them: the second one's operand is what the first one's edit replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Experts(2, 32, 32, dtype=torch.float32), Experts(2, 32, 32, dtype=torch.float32)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.two(self.one(x, offsets), offsets)


def test_a_layer_right_behind_another_reads_its_fp8_result() -> None:
    steps = run_passes(joint_graph(Chain(), torch.randn(8, 32, requires_grad=True), offsets_of(3, 5)), make("cpu"))
    assert steps[1].changes == 6
    uses = [mark_of(node).use for node in steps[2].graph.nodes if op_name(node) == "quantize"]
    assert len(uses) == 6 and {(use.product, use.ordinal, str(use.role)) for use in uses} == {
        (f"{name}.w", 0, role) for name in ("one", "two") for role in ("input", "weight", "grad_output")
    }


@pytest.mark.parametrize(
    ("target", "options", "gemms"),
    [
        ("cuda:90", {"recipe": "tensorwise"}, ["output"]),
        ("cuda:90", {"recipe": "tensorwise", "backward_format": "e4m3"}, ["output", "grad_input", "grad_weight"]),
        ("cuda:90", {"recipe": "rowwise"}, ["output", "grad_input", "grad_weight"]),
        ("cuda:100", {"recipe": "rowwise"}, []),
    ],
)
@pytest.mark.parametrize("transposed", [True, False], ids=["kept as [E, N, K]", "kept as [E, K, N]"])
def test_a_gpu_gets_torchs_own_gemm_where_that_takes_the_operands(
    target: str, transposed: bool, options: dict[str, str], gemms: list[str]
) -> None:
    steps = run_passes(joint_of(torch.bfloat16, transposed=transposed), make(target, **options))
    graph = steps[-1].graph
    made = [node for node in graph.nodes if op_name(node) == "_scaled_grouped_mm"]
    assert sorted(mark_of(node).gemm for node in made) == sorted(gemms)
    assert assert_gpu_accepts(graph) == len(gemms)
    for sizes in GROUPS.values():
        given = Given.of(graph, offsets_of(*sizes), transposed=transposed)
        expected = grouped.in_fp8(*given.operands, options["recipe"], E4M3)
        if sum(sizes) < TOKENS and gemms:  # the reference of torch's gemm has no group for the rest
            continue
        found = numbers(graph, given)
        for gemm in gemms:
            np.testing.assert_allclose(found[gemm], expected[gemm], rtol=2**-8, atol=2**-8, err_msg=f"{gemm} {sizes}")


def test_an_fp32_model_on_a_gpu_gets_what_torch_writes_in_its_own_dtype() -> None:
    graph = run_passes(joint_of(torch.float32), make("cuda:90", recipe="rowwise"))[-1].graph
    assert assert_gpu_accepts(graph) == 3
    assert {t.dtype for t in run(graph, Given.of(graph).inputs) if t is not None} == {torch.float32}


@functools.cache
def wide(dtype: torch.dtype, *, transposed: bool = True) -> JointGraph:
    """Experts whose sizes MXFP8 takes on a GPU."""
    torch.manual_seed(0)
    layer = Layer(EXPERTS, 128, 256, transposed=transposed, dtype=dtype)
    x = torch.randn(4 * 128, 128, dtype=dtype, requires_grad=True)
    return joint_graph(layer, x, offsets_of(7, 0, 400, 1))


WIDE_GROUPS = [(7, 0, 400, 1), (0, 512, 0, 0), (3, 4, 5, 6), (0, 0, 0, 0), (128, 256, 127, 1)]


def of_groups(graph: fx.Graph, sizes: tuple[int, ...]) -> list[Tensor]:
    return [offsets_of(*sizes) if t.dtype == torch.int32 else t for t in random_inputs(graph)]


def test_experts_in_mxfp8_are_quantized_in_groups_that_are_filled_up_where_tokens_are_summed() -> None:
    steps = run_passes(wide(torch.bfloat16), make("cpu", recipe="mxfp8"))
    assert (steps[1].changes, steps[2].changes) == (3, 1)
    shown = ("quantize_mx", "mx_grouped_mm", "view", "permute")
    expecttest.assert_expected_inline(render(steps[2].graph, lambda node: op_name(node) in shown), """\
quantize_mx: (e4m3[512, 128], u8[512, 4]) = quantize_mx(primals_2, [1, 32])
view: bf16[1024, 128] = view(primals_1, [-1, 128])
quantize_mx_1: (e4m3[1024, 128], u8[32, 4]) = quantize_mx(view, [32, 32])
view_1: e4m3[4, 256, 128] = view(quantize_mx_1[0], [4, 256, 128])
view_2: u8[4, 8, 4] = view(quantize_mx_1[1], [4, 8, 4])
permute: e4m3[4, 128, 256]{32768, 1, 128} = permute(view_1, [0, 2, 1])
permute_1: u8[4, 4, 8]{32, 1, 4} = permute(view_2, [0, 2, 1])
mx_grouped_mm: bf16[512, 256] = mx_grouped_mm(quantize_mx[0], permute, primals_3, quantize_mx[1], permute_1, bf16)
quantize_mx_2: (e4m3[640, 256], u8[20, 256]) = quantize_mx(where_1, [32, 1])
quantize_mx_3: (e4m3[640, 128], u8[20, 128]) = quantize_mx(where_2, [32, 1])
mx_grouped_mm_1: bf16[4, 256, 128] = mx_grouped_mm(quantize_mx_2[0].T, quantize_mx_3[0], cumsum, quantize_mx_2[1].T,
    quantize_mx_3[1], bf16)
permute_2: bf16[4, 128, 256]{32768, 1, 128} = permute(mx_grouped_mm_1, [0, 2, 1])
quantize_mx_4: (e4m3[512, 256], u8[512, 8]) = quantize_mx(tangents_1, [1, 32])
mx_grouped_mm_2: bf16[512, 128] = mx_grouped_mm(quantize_mx_4[0], view_1, primals_3, quantize_mx_4[1], view_2, bf16)
permute_3: bf16[4, 256, 128] = permute(permute_2, [0, 2, 1])
return mx_grouped_mm, permute_3, mx_grouped_mm_2, None
""")


@pytest.mark.parametrize("transposed", [True, False], ids=["kept as [E, N, K]", "kept as [E, K, N]"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_b200_multiplies_groups_that_are_filled_up_to_the_numbers_of_a_cpu(
    dtype: torch.dtype, transposed: bool
) -> None:
    joint = wide(dtype, transposed=transposed)
    graphs = [run_passes(joint, make(target, recipe="mxfp8"))[-1].graph for target in ("cpu", "cuda:100")]
    made = [node for node in graphs[1].nodes if op_name(node) == "swizzled_mx_grouped_mm"]
    assert sorted(str(mark_of(node).gemm) for node in made) == ["grad_input", "grad_weight", "output"]
    for sizes in WIDE_GROUPS:
        on_cpu, on_gpu = (run(graph, of_groups(graph, sizes)) for graph in graphs)
        for one, two in zip(on_cpu, on_gpu, strict=True):
            if one is not None:  # torch's gemm for groups writes bf16
                assert two.dtype == dtype and torch.equal(one.bfloat16(), two.bfloat16()), sizes


def test_blockwise_on_a_b200_has_the_numbers_of_blocks_whose_scales_are_powers_of_two() -> None:
    graph = run_passes(wide(torch.bfloat16), make("cuda:100", recipe="blockwise"))[-1].graph
    given = of_groups(graph, (7, 0, 400, 1))
    x, w = (t for t in given[:-1] if t.is_floating_point() and t.dim() in (2, 3))
    x, w = (x, w) if x.dim() == 2 else (w, x)
    y = next(t for t in run(graph, given) if t is not None)
    rounded = dequantize_mx(*quantize_mx(x, (1, 128)), (1, 128)).double()
    start = 0
    for expert, end in enumerate((7, 7, 407, 408)):
        of_expert = dequantize_mx(*quantize_mx(w[expert], (128, 128)), (128, 128)).double()
        torch.testing.assert_close(y[start:end].double(), rounded[start:end] @ of_expert.t(), rtol=2**-7, atol=1e-3)
        start = end


def test_groups_of_any_number_of_tokens_are_filled_up_by_one_graph() -> None:
    layer = Layer(EXPERTS, 128, 128, dtype=torch.bfloat16)
    x = torch.randn(600, 128, dtype=torch.bfloat16, requires_grad=True)
    joint = joint_graph(layer, x, offsets_of(7, 0, 400, 1), dynamic=True)
    steps = run_passes(joint, make("cuda:100", recipe="mxfp8"))
    assert (steps[1].changes, steps[3].changes) == (3, 3)
    made = [node.meta["val"][0] for node in steps[3].graph.nodes if op_name(node) == "quantize_mx_swizzled"]
    rows = [q.shape[0] for q in made]
    assert sum(isinstance(size, torch.SymInt) for size in rows) == 4  # of the input and of the gradient, both ways
