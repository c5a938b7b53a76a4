"""Bytes before and after, against sums done by hand."""

from __future__ import annotations

import torch
from grouped import Layer, offsets_of
from joint_graph import joint_graph, make, run_passes
from made_up_dump import MATRIX, two_products

from fp8_compile.reporting.graph_stages import capture
from fp8_compile.reporting.traffic import estimate


def test_a_shared_quantize_counts_once_and_views_move_nothing() -> None:
    before, after = two_products()
    traffic = estimate(before.stage, after.stage, {"y", "z"})
    assert traffic.gemms_before == 2 * 3 * 2 * MATRIX  # two products of three bf16 matrices
    # The view stands for its FP8 operand, but is built here as bf16: one gemm of 2 + 1 + 2, one of 1 + 1 + 2 bytes.
    assert traffic.by_site == {"y": (6 * MATRIX, 5 * MATRIX), "z": (6 * MATRIX, 4 * MATRIX)}
    assert traffic.quantize_writes == 3 * MATRIX and traffic.quantize_reads == 3 * 2 * MATRIX
    assert traffic.after_fused == 12 * MATRIX and traffic.after_apart == 18 * MATRIX


def test_a_matmul_of_unknown_size_is_counted_as_uncounted() -> None:
    before, after = two_products()
    before.stage.columns["bytes"][3], before.stage.columns["shape"][3] = 0, "[s0, 64]"
    traffic = estimate(before.stage, after.stage, {"y", "z"})
    assert traffic.uncounted == 1 and set(traffic.by_site) == {"z"} and traffic.gemms_before == 6 * MATRIX


def test_both_gradients_of_experts_share_what_their_one_operation_reads() -> None:
    x, layer = torch.randn(64, 32, requires_grad=True), Layer(4, 32, 64, dtype=torch.float32)
    before, rewritten, *_ = run_passes(joint_graph(layer, x, offsets_of(10, 20, 30, 4)), make("cpu"))
    traffic = estimate(
        capture(before.graph, "before", ""),
        capture(rewritten.graph, "rewritten", ""),
        {"grouped_mm_fallback", "getitem", "getitem_1"},
    )
    x_bytes, w_bytes, y_bytes, offsets = 64 * 32 * 4, 4 * 32 * 64 * 4, 64 * 64 * 4, 16
    reads = (x_bytes + w_bytes + offsets + y_bytes) // 2
    assert {site: bytes for site, (bytes, _) in traffic.by_site.items()} == {
        "grouped_mm_fallback": x_bytes + w_bytes + offsets + y_bytes,
        "getitem": reads + x_bytes,
        "getitem_1": reads + w_bytes,
    }
    scales = 8
    assert {site: bytes for site, (_, bytes) in traffic.by_site.items()} == {
        "grouped_mm_fallback": (x_bytes + w_bytes) // 4 + offsets + scales + y_bytes,
        "getitem": (y_bytes + w_bytes) // 4 + offsets + scales + x_bytes,
        "getitem_1": (x_bytes + y_bytes) // 4 + offsets + scales + w_bytes,
    }
