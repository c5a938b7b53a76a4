"""Modules with packed stacks of experts: what they compute, how they are moved, copied, saved and loaded."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from mixtures import experts, routed
from uncompiled import UncompiledBackend

from fp8_compile import Backend, pack
from fp8_compile.kernels import experts as ops
from fp8_compile.kernels.fp8_inputs import round_inputs_op
from fp8_compile.packing.packed_experts import LazyStack, PackedExperts, PackedStack

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def packed(format: str = "nvfp4", transposed: bool = False, implementation: str = "grouped_mm", count: int = 4):
    module = experts(implementation, count, transposed)
    pack(module, format, method="rtn" if format == "nvfp4" else None, progress=False)
    return module


def dequantized(module: PackedExperts, transposed: bool, count: int = 4):
    """The same module with the weights that the packed ones stand for, not packed."""
    other = experts(module.config._experts_implementation, count, transposed)
    for name, parameter in other.named_parameters():
        parameter.data.copy_(getattr(module, name))
    return other


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_every_implementation_computes_with_the_dequantized_weights(format: str, transposed: bool) -> None:
    module = packed(format, transposed)
    same = dequantized(module, transposed)
    for tokens in (1, 9):
        given = routed(tokens)
        for implementation in IMPLEMENTATIONS:
            module.config._experts_implementation = same.config._experts_implementation = implementation
            torch.testing.assert_close(module(*given), same(*given))


def test_a_stack_looks_like_the_weight_and_dequantizes_what_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    module = packed(transposed=True)
    asked = []
    original = ops.nvfp4_dequantize_op
    monkeypatch.setattr(ops, "nvfp4_dequantize_op", lambda *args: asked.append(args[6]) or original(*args))
    weight = module.gate_up_proj
    assert isinstance(weight, LazyStack) and weight.shape == (4, 32, 80) and weight.dtype == torch.float32 and not asked
    whole = weight + 0.0
    assert asked == [None] and type(whole) is torch.Tensor
    assert torch.equal(weight[2], whole[2]) and torch.equal(weight[torch.tensor(2)], whole[2])
    assert torch.equal(weight[torch.tensor([3, 1])], whole[[3, 1]])
    assert [one.tolist() for one in asked[1:]] == [2, 2, [3, 1]]
    assert "tensor(" in repr(weight)
    standard = module.gate_up_proj_packed.matrix(2).dequantize()
    assert torch.equal(standard.t(), whole[2])


def test_memory_is_a_little_more_than_a_quarter_of_bf16() -> None:
    module = experts().bfloat16()
    before = sum(parameter.nbytes for parameter in module.parameters())
    pack(module, method="rtn", progress=False)
    after = sum(tensor.nbytes for tensor in module.state_dict().values())
    kept = sum(one.memory_bytes() for one in module.modules() if isinstance(one, PackedStack))
    assert after == kept <= 0.31 * before  # K = 40 is filled to 48
    wide = module.gate_up_proj_packed  # K = 32
    assert wide.memory_bytes() <= 0.29 * 2 * 4 * 80 * 32


def test_copies_pickles_casts_and_state_dicts_keep_the_weight() -> None:
    module, given = packed(), routed(6)
    expected = module(*given)
    assert isinstance(module, PackedExperts) and type(module).__name__ == "PackedMixtralExperts"
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        assert type(twin) is type(module) and twin.down_proj_packed is not module.down_proj_packed
        assert torch.equal(twin(*given), expected)
    state = module.state_dict()
    assert set(state) == {
        f"{name}_packed.{part}" for name in ("gate_up_proj", "down_proj") for part in module.down_proj_packed.packed
    }
    assert state["down_proj_packed.codes"].shape == (4, 32, 24)
    assert torch.equal(state["down_proj_packed.codes"][1], module.down_proj_packed.matrix(1).codes), "standard layout"
    other = packed()
    other.load_state_dict(state)
    assert torch.equal(other(*given), expected)
    half = copy.deepcopy(module).bfloat16()
    assert half.gate_up_proj.dtype == torch.bfloat16 and half.down_proj_packed.global_scale.dtype == torch.float32
    assert torch.equal(half.down_proj_packed.codes, module.down_proj_packed.codes)
    empty = copy.deepcopy(module).to("meta")
    assert empty.gate_up_proj_packed.codes.is_meta and empty.gate_up_proj_packed.layout == "interleaved"


@pytest.mark.parametrize(
    "implementation, format, backend",
    [("grouped_mm", "nvfp4", Backend()), ("grouped_mm", "fp8", UncompiledBackend())]
    + [("batched_mm", format, UncompiledBackend()) for format in ("nvfp4", "fp8")],
)
def test_compiled_it_runs_from_the_packed_form_for_any_number_of_tokens(implementation, format, backend) -> None:
    """By Inductor once: what it makes of the rest of the graph is not ours."""
    module = packed(format, implementation=implementation).bfloat16()
    compiled = torch.compile(module, backend=backend, dynamic=True)
    for tokens in (7, 40, 3):
        hidden, *routing = routed(tokens)
        given = hidden.bfloat16(), *routing
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), module(*given), rtol=3e-2, atol=3e-2)
    (report,) = backend.reports
    assert len(report.rewritten) == 2 and not report.skipped
    assert [row.weight for row in report.rewritten] == ["gate_up_proj_packed.codes", "down_proj_packed.codes"]


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype, most", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_gradients_flow_to_the_inputs(implementation: str, dtype: torch.dtype, most: float) -> None:
    """Forward from the packed form, backward through a stack that is dequantized anew."""
    module = packed(implementation=implementation).to(dtype)
    hidden, which, weights = routed(6)
    grads = []
    for one in (torch.compile(module, backend=UncompiledBackend()), module):
        x = hidden.to(dtype).requires_grad_()
        one(x, which, weights.to(dtype)).square().sum().backward()
        grads.append(x.grad)
        hidden = hidden.detach().clone()
    assert grads[1].norm() > 0 and (grads[0] - grads[1]).norm() <= most * grads[1].norm()


def test_one_expert_transposed_stacks_and_nan() -> None:
    for transposed, count in ((True, 4), (False, 1)):
        module = packed(transposed=transposed, count=count)
        backend = UncompiledBackend()
        compiled = torch.compile(module, backend=backend)
        hidden, *routing = routed(6, count)
        hidden[2, 3] = torch.nan
        result = compiled(hidden, *routing)
        torch.testing.assert_close(result, module(hidden, *routing), equal_nan=True)
        assert result[2].isnan().all() and result[[0, 1, 3, 4, 5]].isfinite().all()
        assert len(backend.reports[0].rewritten) == 2
        torch._dynamo.reset()


def test_compiled_the_eager_implementation_dequantizes_no_expert_that_has_no_token() -> None:
    module = packed(implementation="eager", count=8)
    hidden, which, weights = routed(2, 8)
    which = torch.tensor([[1, 5], [5, 1]])
    for stack in (module.gate_up_proj_packed, module.down_proj_packed):
        stack.global_scale[[0, 2, 3, 4, 6, 7]] = torch.nan
    compiled = torch.compile(module, backend=UncompiledBackend())
    asked = []
    original = PackedStack.weight.fget
    try:
        PackedStack.weight = property(lambda self: asked.append(torch.compiler.is_compiling()) or original(self))
        result = compiled(hidden, which, weights)
    finally:
        PackedStack.weight = property(original)
    assert result.isfinite().all() and asked == [False] * 4


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scale", [None, 0.01], ids=["dynamic", "static"])
def test_rounded_inputs_are_the_same_in_every_implementation(scale: float | None, transposed: bool) -> None:
    module, given = packed("fp8", transposed), routed(9)
    with torch.no_grad():
        exact = module(*given)
        for name in module.stacks:
            module.stack(name).use_activations("fp8", None if scale is None else torch.tensor(scale))
        matrix, x = module.gate_up_proj[1], torch.randn(3, 32)
        plain = module.gate_up_proj_packed.as_read(module.gate_up_proj_packed.dequantize())[1]
        rounded = round_inputs_op(x, module.gate_up_proj_packed.input_scale)
        assert torch.equal(x @ (matrix if transposed else matrix.t()), rounded @ (plain if transposed else plain.t()))
        outputs = []
        for implementation in IMPLEMENTATIONS:
            module.config._experts_implementation = implementation
            outputs.append(module(*given))
            if implementation != "eager":
                torch._dynamo.reset()
                backend = UncompiledBackend()
                outputs.append(torch.compile(module, backend=backend)(*given))
                words = "dynamic scale a row" if scale is None else "static scale"
                reasons = [row.reason for report in backend.reports for row in report.rewritten]
                assert len(reasons) == 2 and all(f"fp8, inputs e4m3, {words}; rows" in one for one in reasons)
    for output in outputs:
        torch.testing.assert_close(output, outputs[0])
    assert float((outputs[0] - exact).norm() / exact.norm()) > 1e-3, "rounding is seen"


def test_gradients_go_through_rounded_inputs_as_if_they_were_exact() -> None:
    module, given = packed("fp8", implementation="eager"), routed(9)
    x = given[0].requires_grad_()
    for name in module.stacks:
        module.stack(name).use_activations("fp8", torch.tensor(1e-2))
    (found,) = torch.autograd.grad(module(*given).sum(), x)
    module.config._experts_implementation = "grouped_mm"
    run = torch.compile(module, backend=UncompiledBackend())
    (compiled,) = torch.autograd.grad(run(*given).sum(), x)
    torch.testing.assert_close(compiled, found)
