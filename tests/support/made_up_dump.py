"""Dump folders made up without compiling anything: of any size, with names as hostile as one likes."""

from __future__ import annotations

import json
from pathlib import Path

from fp8_compile.passes.graph.row import Row
from fp8_compile.report import Report
from fp8_compile.reporting.graph_stages import TEXTS, Stage, encode, mark_sites, slots_by_site
from fp8_compile.reporting.traffic import estimate

MATRIX = 64 * 64


class StageBuilder:
    """Adds nodes one by one; each is a bf16 or FP8 matrix of 64 by 64."""

    def __init__(self, id: str, title: str) -> None:
        self.stage = Stage(id, title, {field: [] for field in (*TEXTS, "bytes")}, [])

    def add(self, name: str, kind: str, inputs: tuple[int, ...] = (), **fields: str) -> int:
        fp8 = kind == "quantize"
        values = {
            "name": name,
            "kind": kind,
            "target": f"aten.{kind}.default",
            "precision": "fp8_e4m3" if fp8 else "bf16",
            "shape": "[64, 64]",
            "bytes": MATRIX * (1 if fp8 else 2),
            **fields,
        }
        for field, column in self.stage.columns.items():
            column.append(values.get(field, ""))
        self.stage.inputs.append(list(inputs))
        return len(self.stage) - 1


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


def write_dump(
    folder: Path, modules: list[str], *, per_gemm: int = 4, passes: int = 0, blocks: bool = False
) -> Path:
    """A chain of layers, each a product and ``per_gemm`` further nodes; every third one is skipped."""
    folder.mkdir(parents=True)
    rows = []
    before, after = StageBuilder("before", "As it came"), StageBuilder("rewritten", "Rewritten")
    left = before.add("x", "input")
    right = after.add("x", "input")
    for number, module in enumerate(modules):
        skipped, node = number % 3 == 2, f"mm_{number}"
        reason = "excluded by '<img src=x onerror=alert(1)>'" if skipped else "delayed"
        decision, formats = ("skipped", ()) if skipped else ("rewritten", ("e4m3", "e4m3"))
        where = {"node": node, "code": f"m.py:{number} y"}
        rows.append(Row(module, "output", (64, 64, 64), decision, reason, formats=formats, **where))
        known = {"module": module, "gemm": "output", "site": node}
        weight = before.add(f"w_{number}", "input")
        left = before.add(node, "matmul", (left, weight), module=module)
        weight = after.add(f"w_{number}", "input")
        if skipped:
            right = after.add(node, "matmul", (right, weight), **known)
        else:
            q, qw = (
                after.add(f"q_{number}_{role}", "quantize", (of,), slot=f"{module}#0.{role}", **known)
                for role, of in (("input", right), ("weight", weight))
            )
            right = after.add(f"scaled_{number}", "fp8_matmul", (q, qw), **known)
        for extra in range(per_gemm):
            left = before.add(f"relu_{number}_{extra}", "other", (left,), module=module)
            right = after.add(f"relu_{number}_{extra}", "other", (right,), module=module)
    report = Report(tuple(rows), "delayed", "cuda:90", cache="off")
    sites = {row.node for row in report.rewritten}
    for stage in (before.stage, after.stage):
        mark_sites(stage, {row.node: row.gemm for row in rows}, sites)
    slots = slots_by_site(after.stage)
    extra_data = {
        "traffic": estimate(before.stage, after.stage, sites).to_dict(),
        "saved_for_backward": {"all": 3000, "fp8": 1000, "fp8_before": 2000},
        "slots": slots,
    }
    (folder / "report.json").write_text(json.dumps({**report.to_dict(), **extra_data}))
    (folder / "graphs.json").write_text(json.dumps(encode([before.stage, after.stage])))
    if passes:
        write_passes(folder, [name for names in slots.values() for name in names], passes, blocks=blocks)
    return folder


def write_passes(folder: Path, slots: list[str], passes: int, *, blocks: bool = False) -> None:
    """Amaxes that grow slowly; the second tensor saturates, the third meets an Inf in the middle. ``blocks``: as of a
    format with a scale per block, some of which are at an end in the second tensor."""
    lines: list[dict[str, object]] = [{"slots": slots, "largest": [448.0] * len(slots)}]
    for number in range(1, passes + 1):
        amax: list[object] = [1.0 + 0.01 * number] * len(slots)
        overflow = [0] * len(slots)
        if len(slots) > 2:
            overflow[1] = 400 * (number > passes // 2)
            amax[2] = "inf" if number == passes // 2 else amax[2]
        same = {"elements": [4096] * len(slots), "underflow": [1] * len(slots), "sqnr": [31.5] * len(slots)}
        if blocks:
            same |= {"blocks": [256] * len(slots), "at_ends": [number % 7 * (slot == 1) for slot in range(len(slots))]}
        scale = [448.0] * len(slots)
        lines.append({"pass": number, "step": None, "amax": amax, "scale": scale, "overflow": overflow, **same})
    (folder / "passes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
