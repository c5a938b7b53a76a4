"""The rowwise gemm with a second way: the same numbers, one warning, and no other error swallowed."""

from __future__ import annotations

import pytest
import torch
from joint_graph import joint_graph, make, run_passes

from fp8_compile.kernels.gpu import rowwise_mm
from fp8_compile.kernels.gpu.rowwise_mm import rowwise_mm_op
from fp8_compile.passes.pipeline import SplitPipeline
from fp8_compile.passes.split.ask_for_rowwise import AskForRowwise

E4M3 = torch.float8_e4m3fn


def operands() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    left, right = torch.randn(48, 64).to(E4M3), torch.randn(32, 64).to(E4M3).t()
    return left, right, torch.rand(48, 1), torch.rand(1, 32), torch.randn(32).bfloat16()


REFUSALS = (
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic",
    "Rowwise scaling is not currently supported on your device",
    "cutlass cannot run",
)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_both_ways_give_the_formula(monkeypatch: pytest.MonkeyPatch, refusal: str) -> None:
    left, right, scale_left, scale_right, bias = operands()
    exact = left.double() @ right.double() * scale_left * scale_right + bias
    monkeypatch.setattr(rowwise_mm, "_refused", set())

    def refuses(*arguments: object) -> torch.Tensor:
        raise RuntimeError(refusal)

    monkeypatch.setattr(rowwise_mm, "by_rows", refuses)
    given = (left, right, scale_left, scale_right, bias, torch.float32)
    with pytest.warns(UserWarning, match="cuda:0: torch refused an FP8 gemm with a scale per row.*mxfp8"):
        first = rowwise_mm.multiply(*given)
    second = rowwise_mm.multiply(*given)  # a second warning would be an error
    for actual in (first, second, rowwise_mm_op(*given)):
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-4)


def test_another_error_is_not_taken_for_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowwise_mm, "_refused", set())

    def fails(*arguments: object) -> torch.Tensor:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(rowwise_mm, "by_rows", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        rowwise_mm.multiply(*operands(), torch.bfloat16)


def test_rowwise_gemms_for_compute_capability_12_are_asked_for_and_no_others() -> None:
    for target, asked in (("cuda:120", 1), ("cuda:100", 0)):
        rules = make(target, recipe="rowwise")
        x = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
        joint = joint_graph(torch.nn.Linear(64, 32, bias=False).bfloat16(), x)
        graph = run_passes(joint, rules)[-1].graph
        assert any(isinstance(one, AskForRowwise) for one in SplitPipeline(rules, "").passes) == bool(asked)
        if asked:
            before = len(graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default))
            assert AskForRowwise().run(graph).changes == before > 0
            assert len(graph.find_nodes(op="call_function", target=rowwise_mm_op)) == before
