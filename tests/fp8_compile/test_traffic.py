"""Bytes before and after, against sums done by hand."""

from __future__ import annotations

from made_up_dump import MATRIX, two_products

from fp8_compile.traffic import estimate


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
