"""What changed between two reports: two configs, two versions, two models.

    fp8-compile diff before/graph_000 after/graph_000      folders that were dumped
    fp8-compile diff old.json new.json                     report.json files, or what explain --json printed

A gemm is recognised by its module, which gemm it is, and its number among those. Exit code 0: the same, 1: they differ.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path
from typing import Any

from fp8_compile.cli.dump_folder import read_reports
from fp8_compile.cli.terminal import coloured, safe, say

HELP = "compare two reports"
COMPARED = ("decision", "reason", "shape", "formats", "op", "weight")
TOTALS = ("recipe", "target", "matmuls", "rewritten")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="A", help="a dump folder, one graph of it, or a report.json")
    parser.add_argument("new", type=Path, metavar="B", help="the same")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    found = compare(read_reports(options.old), read_reports(options.new))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    return int(any(found.values()))


def compare(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """``totals``, ``changed``, ``removed`` and ``added``, each empty where nothing is."""
    before, after = _by_key(old), _by_key(new)
    changed = []
    for key in before:
        if key in after:
            fields = {
                field: [before[key].get(field), after[key].get(field)]
                for field in COMPARED
                if before[key].get(field) != after[key].get(field)
            }
            changed += [{**_named(key), **fields}] if fields else []
    totals = [
        {"what": name, "old": mine, "new": theirs}
        for name, mine, theirs in zip(_totals(old), _totals(old).values(), _totals(new).values())
        if mine != theirs
    ]
    return {
        "totals": totals,
        "changed": changed,
        "removed": [_named(key) for key in before if key not in after],
        "added": [_named(key) for key in after if key not in before],
    }


def show(found: dict[str, list[dict[str, Any]]]) -> None:
    for total in found["totals"]:
        say(f"{total['what']}: {_text(total['old'])} -> {_text(total['new'])}")
    for row in found["changed"]:
        fields = (f"{field}: {_text(row[field][0])} -> {_text(row[field][1])}" for field in COMPARED if field in row)
        print(coloured("~", "yellow"), safe(f"{row['module']} {row['gemm']}  {'; '.join(fields)}"))
    for sign, colour, rows in (("-", "red", found["removed"]), ("+", "green", found["added"])):
        for row in rows:
            print(coloured(sign, colour), safe(f"{row['module']} {row['gemm']}"))
    if not any(found.values()):
        say("the same")


def _by_key(reports: list[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, Any]]:
    counted: collections.Counter[tuple[str, str]] = collections.Counter()
    rows = {}
    for row in (row for report in reports for row in report["rows"]):
        key = str(row.get("module")) or "(root)", str(row.get("gemm"))
        rows[*key, counted[key]] = row
        counted[key] += 1
    return rows


def _named(key: tuple[str, str, int]) -> dict[str, Any]:
    module, gemm, number = key
    return {"module": module, "gemm": gemm if not number else f"{gemm} #{number + 1}"}


def _totals(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over all graphs, and the bytes that each report estimates."""
    totals: dict[str, Any] = {name: ", ".join(sorted({str(one.get(name)) for one in reports})) for name in TOTALS[:2]}
    totals |= {name: sum(int(one.get(name, 0)) for one in reports) for name in TOTALS[2:]}
    traffic = [one.get("traffic") or {} for one in reports]
    totals["estimated bytes of rewritten gemms, fused"] = sum(int(one.get("after_fused", 0)) for one in traffic)
    saved = [one.get("saved_for_backward") or {} for one in reports]
    totals["bytes kept for backward"] = sum(int(one.get("all", 0)) for one in saved)
    return totals


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "x".join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value) or "none"
