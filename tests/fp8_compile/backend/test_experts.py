"""Mixtures of experts train in FP8: state, groups that change, whole models."""

from __future__ import annotations

import copy
import re
from collections import Counter

import grouped
import numpy as np
import pytest
import torch
from absent_gpu import absent_gpu
from delayed_reference import Model, Rule
from grouped import Layer, offsets_of
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from uncompiled import UncompiledBackend

import fp8_compile
from fp8_compile import Backend, Config, explain
from fp8_compile.passes.graph.row import Row

EXPERTS, K, N = 3, 32, 48
SIZES = [(5, 0, 11), (0, 16, 0), (2, 7, 7), (16, 0, 0), (0, 0, 16), (1, 1, 14)]


def step(seed: int, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, K, generator=generator) * size, torch.randn(16, N, generator=generator) * size


def test_delayed_scales_of_experts_follow_their_history_while_the_groups_change() -> None:
    """Compiled for real, once: against three slots of a simulation and products in FP64."""
    torch.manual_seed(0)
    layer, backend = Layer(EXPERTS, K, N, dtype=torch.float32), Backend(Config())
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    model = Model(Rule())
    x_slot, w_slot = model.forward.slot("input"), model.forward.slot("weight")
    dy_slot = model.backward.slot("grad_output")
    for index, sizes in enumerate(SIZES):
        x, dy = step(index, size=2.0 ** (index % 3))
        offsets, w = offsets_of(*sizes), layer.weight
        model.begin_step()
        quantized = x_slot.see(x), w_slot.see(w.reshape(-1, N)), dy_slot.see(dy)
        model.end_step()
        qx, qw, qdy = (one.dequantized for one in quantized)
        qw = qw.reshape(w.shape)
        expected = grouped.products(offsets, (qx, qw), (qdy, qw), (qx, qdy))
        for name, found in grouped.results(compiled, x, offsets, dy).items():
            np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-5, err_msg=f"{name}, step {index}")
        with torch.no_grad():
            layer.experts.w.mul_(1.1)
    assert len(backend.reports) == 1, "compiled again for other sizes of groups"
    assert {str(row.slot) for row in fp8_compile.scaling_state(layer).stats()} == {
        f"experts.w#0.{role}" for role in ("input", "weight", "grad_output")
    }


def test_a_nan_in_a_token_stays_out_of_the_history_and_in_its_expert() -> None:
    layer = Layer(EXPERTS, K, N, dtype=torch.float32)
    compiled = torch.compile(layer, backend=UncompiledBackend(), fullgraph=True)
    state, offsets = fp8_compile.scaling_state(layer), offsets_of(5, 0, 11)
    (x, dy), bad = step(0), step(1)[0]
    grouped.results(compiled, x, offsets, dy)
    grouped.results(compiled, x, offsets, dy)
    before = copy.deepcopy(state.state_dict())
    bad[7, 3] = torch.nan  # the last expert's
    found = grouped.results(compiled, bad, offsets, dy)
    assert np.isnan(found["output"]).any(1).nonzero()[0].tolist() == [7]
    assert np.isnan(found["grad_weight"]).any((1, 2)).nonzero()[0].tolist() == [2]
    assert np.isfinite(found["grad_input"]).all()
    grouped.results(compiled, x, offsets, dy)
    assert all(t.isfinite().all() for t in torch.utils._pytree.tree_leaves(state.state_dict()) if torch.is_tensor(t))
    assert before.keys() == state.state_dict().keys()


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))


def mixtral() -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**SMALL, **ATTENTION, num_local_experts=4, num_experts_per_tok=2))


def qwen3() -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **ATTENTION, **experts))


def gpt_oss() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"]}
    return GptOssForCausalLM(GptOssConfig(**SMALL, **ATTENTION, **experts))


MODELS = {"mixtral": mixtral, "qwen3_moe": qwen3, "gpt_oss": gpt_oss}


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]()
    model.config._experts_implementation = "grouped_mm"
    return model.to(dtype)


def losses(model: nn.Module, run: nn.Module, steps: int = 5) -> list[float]:
    optimizer, found = torch.optim.Adam(model.parameters(), lr=5e-3), []
    for _ in range(steps):
        loss = run(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_a_mixture_trains_like_in_fp32_with_its_experts_in_fp8(name: str) -> None:
    plain, model, backend = make(name), make(name), UncompiledBackend()
    expected = losses(plain, plain)
    found = losses(model, torch.compile(model, backend=backend))
    fallen = expected[0] - expected[-1]
    assert fallen > 0.3
    np.testing.assert_allclose(found, expected, atol=fallen / 20)  # of what is learned, FP8 may cost a twentieth
    (report,) = backend.reports
    experts = [row for row in report.rows if row.module == "model.layers.0.mlp.experts"]
    assert sorted(row.gemm for row in experts if row.rewritten) == sorted(
        ["output", "grad_input", "grad_weight"] * 2
    ), str(report)


def explain_block(name: str, dtype: torch.dtype, config: Config | None = None) -> tuple[fp8_compile.Report, list[Row]]:
    """The report of a layer's router and experts, and the rows of the experts."""
    block, x = make(name, dtype).model.layers[0].mlp, torch.randn(2, 12, 32, dtype=dtype, requires_grad=True)
    report = explain(block, (x,), config=config)
    return report, [row for row in report.rows if row.module == "experts"]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])  # kept as [experts, N, K], and as [experts, K, N]
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_explain_shows_six_gemms_of_experts(name: str, dtype: torch.dtype) -> None:
    report, experts = explain_block(name, dtype)
    assert len(experts) == 6 and all(row.rewritten for row in experts), str(report)
    assert {row.weight for row in experts} == {"experts.gate_up_proj", "experts.down_proj"}
    assert {row.formats for row in experts if row.gemm == "output"} == {("e4m3", "e4m3")}
    assert all(set(row.formats) == {"e4m3", "e5m2"} for row in experts if row.gemm != "output")
    assert all(row.shape[0] == 4 and 2 * 2 * 12 in row.shape for row in experts), "each token goes to two experts"


def test_explain_for_a_gpu_says_which_gemms_of_experts_stay_in_high_precision() -> None:
    _, experts = explain_block("mixtral", torch.bfloat16, Config(target="cuda:90"))
    assert [row.gemm for row in experts if row.rewritten] == ["output", "output"]
    assert {row.gemm: row.reason for row in experts if not row.rewritten} == {
        "grad_input": "ragged groups: torch multiplies them in e4m3 only, not in e5m2",
        "grad_weight": "ragged groups: torch multiplies them in e4m3 only, not in e5m2",
    }


class Two(nn.Module):
    """Two layers, one kept as [experts, N, K], one as [experts, K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = Layer(EXPERTS, 64, 128, dtype=torch.bfloat16)
        self.down = Layer(EXPERTS, 128, 64, transposed=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x, offsets)), offsets)


def test_the_code_for_an_absent_h100_calls_torchs_grouped_gemm_on_fp8() -> None:
    """Inductor's own checks of strides are stricter than those of tracing: a copy must lie as it was asked to."""

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True), offsets_of(20, 0, 44)

    with absent_gpu(90) as gpu:
        step = gpu.training_step(Two, inputs, backend="fp8", options={"target": "cuda:90", "recipe": "rowwise"})
    calls = re.findall(r"extern_kernels\.(\w+)\(", f"{step.forward}{step.backward}")
    assert Counter(calls) == {"_scaled_grouped_mm": 6}


def test_a_warm_up_records_experts_before_their_first_step_in_fp8() -> None:
    layer = Layer(EXPERTS, K, N, dtype=torch.float32)
    backend = UncompiledBackend(Config(warmup_steps=1))
    compiled, offsets = torch.compile(layer, backend=backend, fullgraph=True), offsets_of(5, 0, 11)
    x, dy = step(0)
    exact = grouped.exact(x, layer.weight, offsets, dy)
    for name, found in grouped.results(compiled, x, offsets, dy).items():
        np.testing.assert_allclose(found, exact[name], rtol=1e-5, atol=1e-5)  # high precision
    expected = grouped.in_fp8(x, layer.weight, offsets, dy)  # the same data again: the scales are those of itself
    for name, found in grouped.results(compiled, x, offsets, dy).items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-5)
