"""pack on mixtures of experts: rows, methods, tied stacks, and that transformers generates from what it makes."""

from __future__ import annotations

import copy

import pytest
import torch
from mixtures import experts, mixtral, qwen, routed
from torch import nn
from uncompiled import UncompiledBackend

from fp8_compile import calibrate, pack, quantize_nvfp4
from fp8_compile.packing.expert_stacks import expert_stacks
from fp8_compile.packing.packed_experts import PackedExperts
from fp8_compile.packing.record_experts import recording_experts

EXPERTS = "model.layers.0.mlp.experts"


def test_every_stack_and_every_weight_that_is_left_alone_has_a_row() -> None:
    model = mixtral()
    report = pack(model, "nvfp4", activations="int8", exclude=("*.down_proj",), progress=False)
    rows = {row.name: row for row in report.rows}
    row = rows[f"{EXPERTS}.gate_up_proj"]
    assert row.packed and row.shape == (4, 96, 32) and row.method == "sweep" and 0.01 < row.error < 0.15
    assert row.bytes_after < 0.15 * row.bytes_before and row.reason == "inputs exact"
    assert rows[f"{EXPERTS}.down_proj"].reason == "excluded by '*.down_proj'"
    assert "MixtralTopKRouter" in rows["model.layers.0.mlp.gate.weight"].reason and not rows["lm_head"].packed
    matrices = {name for name, one in mixtral().named_parameters() if one.dim() > 1 and "embed" not in name}
    assert set(rows) == {name.removesuffix(".weight") if "gate" not in name else name for name in matrices}
    module = model.get_submodule(EXPERTS)
    assert isinstance(module, PackedExperts) and isinstance(module.down_proj, nn.Parameter)
    again = {row.name: row for row in pack(model, progress=False).rows}
    assert again[f"{EXPERTS}.gate_up_proj"].reason == "packed already" and again[f"{EXPERTS}.down_proj"].packed
    assert model.get_submodule(EXPERTS).stacks == ("gate_up_proj", "down_proj")


def test_each_matrix_is_packed_as_a_linear_layers_would_be() -> None:
    module = experts()
    matrices = module.gate_up_proj.detach().clone()
    pack(module, method="four_over_six", progress=False)
    for expert, matrix in enumerate(matrices):
        alone, ours = quantize_nvfp4(matrix, "four_over_six"), module.gate_up_proj_packed.matrix(expert)
        assert all(torch.equal(getattr(alone, part), getattr(ours, part)) for part in module.gate_up_proj_packed.packed)


def test_tied_stacks_stay_tied_and_bad_weights_are_named() -> None:
    model = nn.ModuleList([experts(), experts()])
    model[1].down_proj = model[0].down_proj
    report = pack(model, "fp8", progress=False)
    assert model[0].down_proj_packed is model[1].down_proj_packed
    assert [row.reason for row in report.rows if row.name == "1.down_proj"] == ["tied"]
    module = experts()
    module.down_proj.data[2, 3, 4] = torch.inf
    with pytest.raises(ValueError, match=r"down_proj\[2\].*Inf"):
        pack(module, progress=False)


def test_experts_are_calibrated_each_by_the_tokens_that_reach_it() -> None:
    module, batches = experts("grouped_mm"), [routed(64) for _ in range(2)]
    mixing = torch.randn(32, 32) * torch.logspace(-1, 0.5, 32)  # inputs that hardly vary in some directions
    for hidden, which, _ in batches:
        hidden.copy_(hidden @ mixing)
        which[which == 3] = 0  # no token for the last one
    calibration = calibrate(module, batches, progress=False)
    assert module.config._experts_implementation == "grouped_mm" and type(module).__name__ == "MixtralExperts"
    assert set(calibration.names) == {f"{name}.{i}" for name in ("gate_up_proj", "down_proj") for i in range(3)}
    for expert in range(3):
        mine = torch.cat([hidden[torch.where(which == expert)[0]] for hidden, which, _ in batches])
        ours = calibration.hessian(f"gate_up_proj.{expert}")
        torch.testing.assert_close(ours, mine.t() @ mine / len(mine), rtol=1e-4, atol=1e-3)
        gate, up = (mine @ module.gate_up_proj[expert].t()).chunk(2, dim=1)
        inner = torch.nn.functional.silu(gate) * up
        ours = calibration.hessian(f"down_proj.{expert}")
        torch.testing.assert_close(ours, inner.t() @ inner / len(inner), rtol=1e-4, atol=1e-3)
    swept, tuned = copy.deepcopy(module), copy.deepcopy(module)
    pack(swept, progress=False)
    report = pack(tuned, calibration=calibration, paths=1, passes=0, steps=50, progress=False)
    assert {row.method for row in report.packed} == {"gptq"}
    assert {row.reason for row in report.rows} == {"1 of 4 experts saw no token: packed by sweep"}
    others = calibrate(module, batches, layers=["down_proj"], progress=False)
    rows = pack(copy.deepcopy(module), calibration=others, paths=1, passes=0, steps=5, progress=False).rows
    assert [(row.name, row.method) for row in rows] == [("down_proj", "gptq"), ("gate_up_proj", "sweep")]
    assert rows[1].reason == "its inputs were not calibrated: packed by sweep"
    given = batches[0]
    errors = [(one(*given) - module(*given)).norm() for one in (tuned, swept)]
    assert errors[0] < 0.8 * errors[1]


def test_layers_and_stacks_are_packed_in_the_order_in_which_they_run() -> None:
    model = mixtral(num_hidden_layers=2)
    batches = [torch.randint(0, 64, (2, 12)) for _ in range(2)]
    calibration = calibrate(model, batches, progress=False)
    report = pack(model, calibration=calibration, paths=1, passes=0, steps=5, progress=False)
    assert {row.method for row in report.packed} == {"gptq"}
    order = [row.name.split(".", 2)[2].replace("self_attn", "").rpartition(".")[2] for row in report.packed]
    assert order == ["k_proj", "q_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"] * 2


def test_what_recording_changes_is_put_back_when_a_batch_fails() -> None:
    module = experts("batched_mm")
    with pytest.raises(RuntimeError, match="stop"), recording_experts(expert_stacks(module), lambda name, x: None):
        assert module.config._experts_implementation == "eager"
        raise RuntimeError("stop")
    assert module.config._experts_implementation == "batched_mm" and "gate_up_proj" not in vars(type(module))


@pytest.mark.parametrize("make, implementation", [(mixtral, "grouped_mm"), (qwen, "batched_mm")])
def test_transformers_generates_from_packed_experts_without_recompiling_per_token(make, implementation) -> None:
    model = make()
    model.set_experts_implementation(implementation)
    pack(model, method="rtn", progress=False)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    prompts = [torch.randint(3, 64, (1, length)) for length in (5, 9)]
    expected = [model.generate(prompt, **options) for prompt in prompts]
    backend = UncompiledBackend()  # Dynamo decides what is compiled anew, and our passes run; Inductor need not
    model.forward = torch.compile(model.forward, backend=backend, dynamic=True)
    generated = [model.generate(prompt, **options) for prompt in prompts]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(generated, expected))
    assert len(backend.reports) <= 3, f"{len(backend.reports)} graphs for 16 tokens"
    for report in backend.reports:
        mine = [row for row in report.rows if row.module.endswith("experts")]
        assert [row.decision for row in mine] == ["rewritten"] * 2
        assert [row.weight.split(".")[-2] for row in mine] == ["gate_up_proj_packed", "down_proj_packed"]
