"""Dump folders as arguments: the folder of a run, of one graph, or a report's file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def graph_folders(folder: Path) -> list[Path]:
    """The folders with a report in them: the given one, or its ``graph_NNN``; a ValueError where there are none."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected one that options={{'dump': folder}} has written")
    if (folder / "report.json").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("graph_*/report.json"))
    if not found:
        raise ValueError(
            f"{folder} holds no report.json and no graph_NNN/report.json; expected a folder that "
            "torch.compile(model, backend='fp8', options={'dump': folder}) has written"
        )
    return found


def read_reports(path: Path) -> list[dict[str, Any]]:
    """The reports of a folder, or of one file."""
    from fp8_compile.reporting.report_page import read_json

    files = [path] if path.is_file() else [folder / "report.json" for folder in graph_folders(path)]
    reports = [read_json(file) for file in files]
    for file, report in zip(files, reports):
        rows = report.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{file} has no rows; expected a report.json of fp8_compile")
    return reports
