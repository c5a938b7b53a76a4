"""Bytes before and after, against sums done by hand."""

from __future__ import annotations

from made_up_dump import MATRIX, StageBuilder

from fp8_compile.graph_stages import decode, encode, mark_sites, slots_by_site
from fp8_compile.traffic import estimate


def two_products() -> tuple[StageBuilder, StageBuilder]:
    """y = x @ w, z = x @ v in bf16; after: x quantized once for both."""
    before, after = StageBuilder("before", ""), StageBuilder("rewritten", "")
    for builder in (before, after):
        for name in "xwv":
            builder.add(name, "input")
    before.add("y", "matmul", (0, 1))
    before.add("z", "matmul", (0, 2))
    x, w, v = (after.add(f"q{name}", "quantize", (of,), slot=f"{name}#0", site="y") for of, name in enumerate("xwv"))
    turned = after.add("view", "view", (w,), site="y")
    after.add("y_fp8", "fp8_matmul", (x, turned), site="y")
    after.add("z_fp8", "fp8_matmul", (x, v), site="z")
    return before, after


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


def test_the_slots_of_a_gemm_are_found_through_views_left_before_right() -> None:
    _, after = two_products()
    assert slots_by_site(after.stage) == {"y": ["x#0", "w#0"], "z": ["x#0", "v#0"]}


def test_stages_read_back_as_they_were_written() -> None:
    stages = [builder.stage for builder in two_products()]
    assert decode(encode(stages)) == stages


def test_a_gemm_is_marked_before_the_rewrite_and_a_plain_product_in_place_of_one_is_an_fp8_gemm() -> None:
    before, after = two_products()
    after.add("tiled", "matmul", (0, 1), site="y")
    for builder in (before, after):
        mark_sites(builder.stage, {"y": "output", "z": "grad_input"}, {"y"})
    assert before.stage.columns["site"] == ["", "", "", "y", "z"]
    assert before.stage.columns["gemm"][-1] == "grad_input" and before.stage.columns["kind"][3] == "matmul"
    assert after.stage.columns["kind"][-1] == "fp8_matmul"
