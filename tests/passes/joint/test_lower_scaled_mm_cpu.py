"""An FP8 gemm for the CPU has the numbers of ``_scaled_mm`` by its definition."""

from __future__ import annotations

import functools

import pytest
import torch
from graph_text import ops
from joint_graph import Step, joint_graph, make, random_inputs, run, run_passes
from module_of import ModuleOf
from torch import Tensor, nn
from uncompiled import UncompiledBackend

INF, NAN = float("inf"), float("nan")


@functools.cache  # nothing below changes them
def steps_of(recipe: str, dtype: torch.dtype, bias: bool = True) -> list[Step]:
    x = torch.randn(37, 131, dtype=dtype, requires_grad=True)
    return run_passes(joint_graph(nn.Linear(131, 150, bias=bias, dtype=dtype), x), make("cpu", recipe=recipe))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_lowered_gemm_is_the_defined_one(recipe: str, dtype: torch.dtype) -> None:
    *_, before, after = steps_of(recipe, dtype)
    assert (before.name, after.name, after.changes) == ("LowerQuantizes", "LowerScaledMmForCpu", 3)
    assert (ops(before.graph)["_scaled_mm"], "_scaled_mm" in ops(after.graph)) == (3, False)
    inputs = random_inputs(before.graph)
    tolerance = {torch.float32: 2.0**-16, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    expected, results = run(before.graph, inputs), run(after.graph, inputs)
    assert [result.dtype for result in results] == [dtype] * 4
    torch.testing.assert_close(results, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("poison", [INF, -INF, NAN])
def test_a_value_that_is_not_finite_reaches_the_results_that_read_it(recipe: str, poison: float) -> None:
    graph = steps_of(recipe, torch.float32, bias=False)[-1].graph
    weight, x, grad_output = random_inputs(graph)
    x[3, 5] = poison
    output, grad_weight, grad_input = run(graph, [weight, x, grad_output])
    assert not output[3].isfinite().any()
    assert not grad_weight[:, 5].isfinite().any()
    assert grad_input.isfinite().all()
    if recipe != "tensorwise":
        assert output[4:].isfinite().all()


def test_the_models_own_fp8_matmul_is_left_alone() -> None:
    def own(self: ModuleOf, x: Tensor) -> Tensor:
        h = self.layer(x)
        q, one = h.detach().to(torch.float8_e4m3fn), torch.ones(())
        return h + torch._scaled_mm(q, q.t(), one, one, out_dtype=torch.float32)

    backend = UncompiledBackend()
    torch.compile(ModuleOf(own, layer=nn.Linear(32, 32)), backend=backend)(torch.randn(32, 32))
    assert [row.reason for row in backend.reports[0].skipped] == ["the model's own FP8 matmul"]
