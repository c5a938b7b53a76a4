"""MultiplyPacked: the graph before and after, and what it leaves alone."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from unnamed import Unnamed

from fp8_compile import quantize_nvfp4
from fp8_compile.kernels import fp8_inputs, fp8_weight
from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op
from fp8_compile.kernels.nvfp4 import ops
from fp8_compile.passes.joint.find_matmuls import find_matmuls
from fp8_compile.passes.joint.lower_quantizes import LowerQuantizes
from fp8_compile.passes.joint.multiply_packed import MultiplyPacked

aten = torch.ops.aten
WEIGHT = quantize_nvfp4(torch.randn(24, 32))
NAMES = Unnamed("layer", buffers=())
PARTS = WEIGHT.codes, WEIGHT.block_scales, WEIGHT.global_scale


def rewritten(function, *args: torch.Tensor, target: str = "cpu") -> tuple[fx.GraphModule, MultiplyPacked]:
    """The function's graph with the pass run on it, as Inductor would have it: values are fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = make_fx(function, tracing_mode="fake")(*(torch.empty_like(arg) for arg in args))
    one = MultiplyPacked(NAMES, target)
    report = one.run(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.graph.lint()
    traced.recompile()
    assert report.changes == len(one.rows)
    return traced, one


def targets(traced: fx.GraphModule) -> list[object]:
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def dequantized(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ops.dequantize_op(*PARTS, 32, dtype, "standard")


def test_a_product_with_a_dequantized_weight_is_one_op_that_gives_the_same() -> None:
    x, bias = torch.randn(5, 32), torch.randn(24)
    for function in (
        lambda x, bias, *parts: aten.addmm(bias, x, ops.dequantize_op(*parts, 32, torch.float32, "standard").t()),
        lambda x, bias, *parts: aten.mm(x, ops.dequantize_op(*parts, 32, torch.float32, "standard").t()) + bias,
    ):
        traced, one = rewritten(function, x, bias, *PARTS)
        assert targets(traced)[0] is ops.mm_op and ops.dequantize_op not in targets(traced)
        torch.testing.assert_close(traced(x, bias, *PARTS), function(x, bias, *PARTS))
        (row,) = one.rows
        assert (row.module, row.shape, row.decision, row.weight) == ("layer", (5, 24, 32), "rewritten", "layer.codes")


def test_rounded_activations_become_an_argument_also_behind_a_cast() -> None:
    x = torch.randn(5, 32)

    def function(x: torch.Tensor, *parts: torch.Tensor) -> torch.Tensor:
        weight = ops.dequantize_op(*parts, 32, torch.bfloat16, "standard")
        return aten.mm(ops.round_activations_op(x, "int8").to(torch.bfloat16), weight.t())

    traced, one = rewritten(function, x, *PARTS)
    assert ops.round_activations_op not in targets(traced) and one.rows[0].formats == ("int8", "e2m1")
    (node,) = traced.graph.find_nodes(op="call_function", target=ops.mm_op)
    assert node.args[5] == "int8" and node.meta["val"].dtype == torch.bfloat16
    y, expected = traced(x, *PARTS).float(), function(x, *PARTS).float()  # rounded to bf16 before int8 or behind it
    assert (y - expected).norm() < 0.02 * expected.norm()


def test_fp8_weights_have_their_own_op() -> None:
    x, (codes, scales) = torch.randn(5, 32), fp8_weight.quantize(torch.randn(24, 32))

    def function(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return aten.mm(x, fp8_weight.dequantize_op(codes, scales, torch.float32).t())

    traced, one = rewritten(function, x, codes, scales)
    assert targets(traced) == [fp8_weight.mm_op] and one.rows[0].formats == ("float32", "e4m3")
    torch.testing.assert_close(traced(x, codes, scales), function(x, codes, scales))


def fp8_product(
    x: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    weight = fp8_weight.dequantize_op(codes, scales, x.dtype)
    return aten.addmm(bias, fp8_inputs.round_inputs_op(x, scale), weight.t())


@pytest.mark.parametrize("static", [True, False])
def test_rounded_inputs_times_fp8_weights_are_an_fp8_gemm(static: bool) -> None:
    (codes, scales), bias = fp8_weight.quantize(torch.randn(24, 32)), torch.randn(24)
    x, scale = torch.randn(5, 32), torch.tensor(0.01) if static else None
    function = fp8_product if static else lambda x, *rest: fp8_product(x, None, *rest)
    args = [one for one in (x, scale, bias, codes, scales) if one is not None]
    traced, one = rewritten(function, *args)
    getitem = [operator.getitem] * 2
    assert targets(traced) == [
        aten.permute.default,
        aten.unsqueeze.default,
        fp8_inputs.quantize_inputs_op,
        *getitem,
        scaled_mm_op,
    ]
    torch.testing.assert_close(traced(*args), function(*args), rtol=1e-5, atol=1e-5)
    (row,) = one.rows
    kind = "static scale" if static else "dynamic scale a row"
    assert row.formats == ("e4m3", "e4m3") and row.reason == f"packed weight: fp8, inputs e4m3, {kind}"
    assert row.node == "addmm"


def test_for_a_gpu_it_is_a_rowwise_scaled_mm_where_sizes_allow() -> None:
    for n, k, gemm in ((32, 48, aten._scaled_mm.default), (24, 48, fp8_weight.mm_op)):
        (codes, scales), bias = fp8_weight.quantize(torch.randn(n, k)), torch.randn(n)
        args = (torch.randn(5, k), torch.tensor(0.01), bias, codes, scales)
        traced, one = rewritten(fp8_product, *args, target="cuda:90")
        (node,) = [node for node in traced.graph.nodes if node.target is gemm]
        if gemm is fp8_weight.mm_op:
            assert "multiplied in float32: cuda:90 wants multiples of 16, not N=24" in one.rows[0].reason
            torch.testing.assert_close(traced(*args), fp8_product(*args), rtol=1e-4, atol=1e-4)
            continue
        assert [list(node.args[at].meta["val"].shape) for at in (2, 3)] == [[5, 1], [1, n]]
        assert node.meta["val"].dtype == torch.bfloat16 and node.args[1].meta["val"].stride() == (1, k)
        assert find_matmuls(traced.graph, NAMES) == [], "it is accounted for"
        LowerQuantizes("cuda:90").run(traced.graph)
        assert fp8_inputs.quantize_inputs_op not in targets(traced), "Inductor fuses the cast with what comes before"


def test_other_uses_of_the_weight_are_left_alone() -> None:
    """Not transposed, added to a matrix, scaled, or read by something else: no row, the same graph."""
    x, added = torch.randn(5, 24), torch.randn(5, 24)

    def function(x: torch.Tensor, added: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = ops.dequantize_op(*parts, 32, torch.float32, "standard")
        y = aten.mm(x, weight)
        return y, aten.addmm(added, y, weight.t()), aten.addmm(added[0], y, weight.t(), alpha=2), weight.sum()

    traced, one = rewritten(function, x, added, *PARTS)
    assert one.rows == [] and ops.mm_op not in targets(traced)


def test_fp8_weights_are_e4m3_with_a_scale_a_row() -> None:
    w = torch.randn(8, 32) * torch.logspace(-20, 20, 8)[:, None]
    w[3] = 0
    codes, scales = fp8_weight.quantize(w)
    after = fp8_weight.dequantize(codes, scales)
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (8,) and not after[3].any()
    error = (after - w).abs() / w.abs().amax(1, keepdim=True).clamp(min=1e-30)
    assert error.max() <= 2**-4 + 1e-6 and error.max() > 0
    x, bias = torch.randn(3, 32), torch.randn(8)
    torch.testing.assert_close(fp8_weight.product(x, codes, scales, bias), x @ after.t() + bias, rtol=1e-4, atol=1e-5)
