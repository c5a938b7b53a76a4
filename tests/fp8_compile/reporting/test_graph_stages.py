"""Graphs as columns of plain data: links between them, and that they read back. Real graphs: test_recorder.py."""

from __future__ import annotations

from made_up_dump import two_products

from fp8_compile.reporting.graph_stages import decode, encode, mark_sites, slots_by_site


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
