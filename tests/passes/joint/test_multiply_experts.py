"""MultiplyPacked on stacks of experts: the graph before and after, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from unnamed import Unnamed

from fp8_compile import quantize_nvfp4
from fp8_compile.kernels import experts, fp8_inputs, fp8_weight
from fp8_compile.passes.joint.multiply_packed import MultiplyPacked

aten = torch.ops.aten
MATRICES = [quantize_nvfp4(torch.randn(24, 32), "rtn") for _ in range(3)]
NVFP4 = tuple(torch.stack([getattr(m, part) for m in MATRICES]) for part in ("codes", "block_scales", "global_scale"))
FP8 = tuple(torch.stack(parts) for parts in zip(*(fp8_weight.quantize(torch.randn(24, 32)) for _ in range(3))))
NAMES = Unnamed("mlp.experts", buffers=("mlp.experts.down_proj_packed.codes",))
X, ENDS, WHICH = torch.randn(5, 32), torch.tensor([1, 1, 5], dtype=torch.int32), torch.tensor([2, 0, 0, 1, 2])


def rewritten(function, *args: Tensor, target: str = "cpu") -> tuple[fx.GraphModule, MultiplyPacked]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = make_fx(function, tracing_mode="fake")(*(torch.empty_like(arg) for arg in args))
    one = MultiplyPacked(NAMES, target)
    one.run(traced.graph)
    traced.graph.eliminate_dead_code()
    traced.graph.lint()
    traced.recompile()
    return traced, one


def targets(traced: fx.GraphModule) -> list[object]:
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def weight(parts: tuple[Tensor, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    if len(parts) == 3:
        return experts.nvfp4_dequantize_op(*parts, 32, dtype, "standard")
    return experts.fp8_dequantize_op(*parts, dtype)


def grouped(x: Tensor, ends: Tensor, *parts: Tensor) -> Tensor:
    return aten._grouped_mm(x.bfloat16(), weight(parts, torch.bfloat16).transpose(1, 2), ends)


def grouped_by_transformers(x: Tensor, ends: Tensor, *parts: Tensor) -> Tensor:
    import transformers.integrations.moe  # noqa: F401  defines the op

    return torch.ops.transformers.grouped_mm_fallback(x, weight(parts).permute(0, 2, 1), ends)


def gathered(x: Tensor, which: Tensor, *parts: Tensor) -> Tensor:
    return aten.bmm(weight(parts)[which], x.unsqueeze(-1)).squeeze(-1)


def gathered_transposed(x: Tensor, which: Tensor, *parts: Tensor) -> Tensor:
    return aten.bmm(x.unsqueeze(1), weight(parts).transpose(1, 2)[which]).squeeze(1)


@pytest.mark.parametrize("parts", [NVFP4, FP8], ids=["nvfp4", "fp8"])
@pytest.mark.parametrize(
    "function, index",
    [(grouped, ENDS), (grouped_by_transformers, ENDS), (gathered, WHICH), (gathered_transposed, WHICH)],
)
def test_a_product_with_a_dequantized_stack_is_one_op_that_gives_the_same(function, index, parts) -> None:
    traced, one = rewritten(function, X, index, *parts)
    product = experts.nvfp4_mm_op if len(parts) == 3 else experts.fp8_mm_op
    assert targets(traced).count(product) == 1
    assert not {experts.nvfp4_dequantize_op, experts.fp8_dequantize_op, aten.bmm.default} & set(targets(traced))
    result, expected = traced(X, index, *parts), function(X, index, *parts)
    most = 1e-2 if expected.dtype == torch.bfloat16 else 1e-5  # of the former the weight was rounded, too
    assert result.dtype == expected.dtype and (result - expected).norm() <= most * expected.norm()
    (row,) = one.rows
    assert (row.module, row.shape, row.decision) == ("mlp.experts", (3, 5, 24, 32), "rewritten")
    assert row.weight == "mlp.experts.down_proj_packed.codes" and row.formats[1] == ("e2m1", "e4m3")[len(parts) == 2]
    assert ("grouped" if index is ENDS else "gathered") in row.reason


def test_experts_that_are_looked_up_for_something_else_are_the_only_ones_dequantized() -> None:
    def function(which: Tensor, *parts: Tensor) -> Tensor:
        return weight(parts).transpose(1, 2)[which].abs().sum(0)

    traced, one = rewritten(function, WHICH, *NVFP4)
    (node,) = traced.graph.find_nodes(op="call_function", target=experts.nvfp4_dequantize_op)
    assert len(node.args) == 7 and node.meta["val"].shape == (5, 24, 32) and one.rows == []
    torch.testing.assert_close(traced(WHICH, *NVFP4), function(WHICH, *NVFP4))


def test_a_gpu_has_no_such_product_and_dequantizes_what_is_looked_up() -> None:
    traced, one = rewritten(gathered, X, WHICH, *NVFP4, target="cuda:90")
    assert aten.bmm.default in targets(traced) and experts.nvfp4_mm_op not in targets(traced) and one.rows == []
    (node,) = traced.graph.find_nodes(op="call_function", target=experts.nvfp4_dequantize_op)
    assert node.meta["val"].shape == (5, 24, 32)
    torch.testing.assert_close(traced(X, WHICH, *NVFP4), gathered(X, WHICH, *NVFP4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, *parts: aten.bmm(x.expand(3, 5, 32), weight(parts).transpose(1, 2)),  # every expert, all rows
        lambda x, *parts: aten._grouped_mm(x.bfloat16(), weight(parts, torch.bfloat16).reshape(3, 32, 24), ENDS),
        lambda x, *parts: aten.mm(x, weight(parts)[1].t()),
    ],
)
def test_other_uses_of_a_stack_are_left_alone(function) -> None:
    traced, one = rewritten(function, X, *NVFP4)
    assert experts.nvfp4_mm_op not in targets(traced) and experts.nvfp4_dequantize_op in targets(traced)
    assert one.rows == []


def test_a_gpu_multiplies_rounded_inputs_by_the_dequantized_stack() -> None:
    def rounding(x: Tensor, ends: Tensor, codes: Tensor, scales: Tensor, input_scale: Tensor) -> Tensor:
        w = experts.fp8_dequantize_rounding_op(codes, scales, input_scale, torch.bfloat16)
        return aten._grouped_mm(x.bfloat16(), w.transpose(1, 2), ends)

    for target, wanted in (("cuda:90", fp8_inputs.round_inputs_op), ("cpu", fp8_inputs.quantize_inputs_op)):
        traced, one = rewritten(rounding, X, ENDS, *FP8, torch.tensor(0.01), target=target)
        assert targets(traced).count(wanted) == 1
        assert (experts.fp8_mm_op in targets(traced)) == (target == "cpu")
