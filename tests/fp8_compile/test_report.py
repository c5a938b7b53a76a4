"""The report: a table for people, plain data for programs, one line for logs."""

from __future__ import annotations

import json

import pytest

from fp8_compile import Report
from fp8_compile.passes.graph.row import Row
from fp8_compile.report import merge

ROWS = (
    Row("blocks.0.up", "output", (8, 48, 32), "rewritten", "tensorwise", "addmm", "blocks.0.up.weight", ("e4m3",) * 2),
    Row("blocks.0.gate", "output", ("s0", 4, 32), "skipped", "N=4 is below min_dim=16", "mm", "blocks.0.gate.weight"),
    Row("blocks.1.gate", "output", ("s0", 4, 32), "skipped", "N=4 is below min_dim=16", "mm", "blocks.1.gate.weight"),
    Row("", "grad_weight", (2, 48, 32, 8), "skipped", "excluded by 'x'", "bmm"),
)


def report(rows: tuple[Row, ...] = ROWS, cache: str = "miss") -> Report:
    return Report(rows, "tensorwise", "cpu", cache)


def test_rows_are_split_by_decision() -> None:
    assert report().rewritten == [ROWS[0]] and report().skipped == list(ROWS[1:])
    assert [row.rewritten for row in ROWS] == [True, False, False, False]


def test_the_table_has_a_line_a_gemm_and_the_summary() -> None:
    assert str(report()).split("\n") == [
        "module         gemm         shape MxNxK  decision   reason",
        "-" * len("blocks.0.gate  output       s0x4x32      skipped    N=4 is below min_dim=16"),
        "blocks.0.up    output       8x48x32      rewritten  tensorwise",
        "blocks.0.gate  output       s0x4x32      skipped    N=4 is below min_dim=16",
        "blocks.1.gate  output       s0x4x32      skipped    N=4 is below min_dim=16",
        "(root)         grad_weight  2x48x32x8    skipped    excluded by 'x'",
        "rewrote 1 of 4 matmuls (blocks.0.gate and 1 more: N=4 is below min_dim=16; (root): excluded by 'x')",
    ]


def test_a_table_without_rows_is_still_a_table() -> None:
    assert str(report(())).endswith("rewrote 0 of 0 matmuls")


def test_the_summary_says_when_the_code_came_from_the_cache() -> None:
    assert report(cache="hit").summary().endswith("code from Inductor's cache")
    assert "cache" not in report().summary()


def test_the_summary_stays_one_short_line_for_many_reasons() -> None:
    rows = tuple(Row(f"layer{i}", "output", (1, 1, 1), "skipped", f"reason {i}") for i in range(9))
    summary = report(rows).summary()
    assert "\n" not in summary and summary.endswith("layer3: reason 3; 5 more reasons)")


def test_plain_data_survives_json() -> None:
    data = json.loads(json.dumps(report().to_dict()))
    assert Report.from_dict(data) == report()
    assert (data["matmuls"], data["rewritten"], data["recipe"], data["target"]) == (4, 1, "tensorwise", "cpu")
    assert data["rows"][1]["shape"] == ["s0", 4, 32]


def test_reports_of_several_graphs_become_one() -> None:
    both = merge([report(ROWS[:1]), report(ROWS[1:])], cache="not compiled")
    assert both.rows == ROWS and both.graphs == 2 and both.cache == "not compiled"


def test_merging_nothing_says_that_nothing_was_traced() -> None:
    with pytest.raises(ValueError, match="no graph was traced"):
        merge([], cache="not compiled")
