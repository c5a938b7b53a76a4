"""The fused inference ops of nn.TransformerEncoderLayer and nn.MultiheadAttention are opened, with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from uncompiled import UncompiledBackend

from fp8_compile import Config, Report
from fp8_compile.backend.fused_inference_ops import encoder_layer, multi_head_attention

BATCH, TOKENS, D, HEADS = 2, 8, 32, 2
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
PADDING = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
PADDING[1, 5:] = True
EXACT = Config(min_dim=2**30)  # every matmul is too small: the opened ops without FP8
MASKS = {
    "no mask": {},
    "causal": {"src_mask": CAUSAL},
    "causal of floats": {"src_mask": torch.zeros(TOKENS, TOKENS).masked_fill(CAUSAL, -torch.inf)},
    "padding": {"src_key_padding_mask": PADDING},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
}


def snr(actual: torch.Tensor, expected: torch.Tensor) -> float:
    noise = (actual.double() - expected.double()).square().sum().item()
    signal = expected.double().square().sum().item()
    return float("inf") if noise == 0 else 10 * torch.tensor(signal / noise).log10().item()


def infer(model: nn.Module, *args: Any, config: Config | None = None, **kwargs: Any) -> tuple[Report, Any, Any]:
    """(report, compiled result, eager result) in eval mode without gradients."""
    backend = UncompiledBackend(config)
    with torch.no_grad():
        actual = torch.compile(model.eval(), backend=backend, fullgraph=True)(*args, **kwargs)
        expected = model(*args, **kwargs)
    (report,) = backend.reports
    return report, actual, expected


def layer(**options: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(D, HEADS, 64, batch_first=True, **options).eval()
    for name, parameter in made.named_parameters():
        if "bias" in name:  # zero as they come: a bias that is lost would not be missed
            nn.init.normal_(parameter, std=0.5)
    return made


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=["relu", "norm first, gelu"])
def test_encoder_layer_shows_its_four_projections_and_equals_eager(options: dict[str, Any], mask: str) -> None:
    report, actual, expected = infer(layer(**options), torch.randn(BATCH, TOKENS, D), **MASKS[mask])
    assert snr(actual, expected) > 20
    assert snr(actual, expected) < 60, "nothing was rounded to FP8"
    assert {row.shape for row in report.rewritten} == {(16, 96, 32), (16, 32, 32), (16, 64, 32), (16, 32, 64)}
    assert {row.gemm for row in report.rows} == {"output"}
    assert all("activation by activation" in row.reason for row in report.skipped)


@pytest.mark.parametrize("mask", MASKS)
def test_masked_tokens_have_no_influence(mask: str) -> None:
    model, data = layer(), torch.randn(BATCH, TOKENS, D)
    backend = UncompiledBackend(EXACT)  # so that any influence is seen
    changed = data.clone()
    changed[1, 5:] = 7.0
    with torch.no_grad():
        compiled = torch.compile(model, backend=backend)
        difference = (compiled(data, **MASKS[mask]) - compiled(changed, **MASKS[mask])).abs()
    seen = difference[1, :5].max().item()
    assert (seen == 0) == (mask != "no mask"), seen


@pytest.mark.parametrize("mask", ["no mask", "padding"])
def test_without_fp8_the_opened_layer_is_equal_to_the_fused_op(mask: str) -> None:
    report, actual, expected = infer(layer(), torch.randn(BATCH, TOKENS, D), config=EXACT, **MASKS[mask])
    assert not report.rewritten
    keep = ~PADDING if mask == "padding" else torch.ones_like(PADDING)
    torch.testing.assert_close(actual[keep], expected[keep], rtol=1e-4, atol=1e-5)


def test_a_layer_inside_the_fused_op_can_be_excluded_by_its_own_name() -> None:
    model = nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False)
    report, actual, expected = infer(model, torch.randn(BATCH, TOKENS, D), config=Config(exclude="*.linear1"))
    skipped = [row for row in report.skipped if row.reason == "excluded by '*.linear1'"]
    assert {row.weight for row in skipped} == {"layers.0.linear1.weight", "layers.1.linear1.weight"}
    assert len(report.rewritten) == 6 and snr(actual, expected) > 20


def test_rows_of_a_fused_layer_are_named_after_the_layer_that_owns_the_weight() -> None:
    model = nn.TransformerEncoder(layer(), 1, enable_nested_tensor=False)
    report, _, _ = infer(model, torch.randn(BATCH, TOKENS, D))
    assert {row.weight for row in report.rewritten} == {
        "layers.0.self_attn.in_proj_weight",
        "layers.0.self_attn.out_proj.weight",
        "layers.0.linear1.weight",
        "layers.0.linear2.weight",
    }
    assert all(row.module.startswith("layers.0") for row in report.rows)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("mask", [None, PADDING])
def test_attention_returns_the_same_output_and_weights(need_weights: bool, average: bool, mask: Any) -> None:
    model, data = nn.MultiheadAttention(D, HEADS, batch_first=True), torch.randn(BATCH, TOKENS, D)
    options = {"need_weights": need_weights, "average_attn_weights": average, "key_padding_mask": mask}
    report, actual, expected = infer(model, data, data, data, **options)
    assert snr(actual[0], expected[0]) > 20
    assert (actual[1] is None) == (expected[1] is None)
    if expected[1] is not None:
        assert actual[1].shape == expected[1].shape and snr(actual[1], expected[1]) > 20
    assert len(report.rewritten) == 2


def test_attention_of_another_sequence_projects_query_key_and_value_apart() -> None:
    model, memory = nn.MultiheadAttention(D, HEADS, batch_first=True), torch.randn(BATCH, TOKENS, D)
    report, actual, expected = infer(model, torch.randn(BATCH, TOKENS, D), memory, memory)
    assert snr(actual[0], expected[0]) > 20 and len(report.rewritten) >= 3


def test_inference_mode_takes_the_same_way() -> None:
    model, data, backend = layer(), torch.randn(BATCH, TOKENS, D), UncompiledBackend()
    with torch.inference_mode():
        actual, expected = torch.compile(model, backend=backend)(data), model(data)
    assert snr(actual, expected) > 20 and len(backend.reports[0].rewritten) == 4


def test_the_functions_are_the_ops_they_stand_for() -> None:
    """Against torch's own fused ops, every mask type, without any FP8."""
    model, data = layer(norm_first=True, activation="gelu"), torch.randn(BATCH, TOKENS, D)
    attn = model.self_attn
    weights = (attn.in_proj_weight, attn.in_proj_bias, attn.out_proj.weight, attn.out_proj.bias)
    merged = CAUSAL.expand(BATCH, HEADS, TOKENS, TOKENS) | PADDING[:, None, None]
    with torch.no_grad():
        for mask, kind in ((None, None), (CAUSAL, 0), (PADDING, 1), (merged, 2)):
            args = (data, data, data, D, HEADS, *weights, mask, True, False, kind)
            for actual, expected in zip(multi_head_attention(*args), torch._native_multi_head_attention(*args)):
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            norms = (model.norm1.weight, model.norm1.bias, model.norm2.weight, model.norm2.bias)
            ffn = (model.linear1.weight, model.linear1.bias, model.linear2.weight, model.linear2.bias)
            args = (data, D, HEADS, *weights, True, True, 1e-5, *norms, *ffn, mask, kind)
            expected = torch._transformer_encoder_layer_fwd(*args)
            keep = ~PADDING if mask is PADDING else torch.ones_like(PADDING)
            torch.testing.assert_close(encoder_layer(*args)[keep], expected[keep], rtol=1e-4, atol=1e-4)
