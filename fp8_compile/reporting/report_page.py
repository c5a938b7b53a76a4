"""``report.html``: one file that needs nothing else, made of a dump folder's data and the sources in ``page/``.

    report.json + graphs.json + passes.jsonl  ->  page.html with page.css, *.js and the data inside
"""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any, Sequence

from fp8_compile import json_files
from fp8_compile.scaling.recorder import FILE as PASSES_FILE
from fp8_compile.whole_files import written_beside

SCRIPTS = ("data.js", "layout.js", "graph.js", "table.js", "charts.js", "summary.js", "page.js")  # in order of use
# A page of a thousand tensors and a million passes must still open at once.
MOST_MOMENTS, FEWEST_MOMENTS, MOST_POINTS = 512, 32, 60_000
MOST_PASSES_BYTES = 2**30
KEPT = {
    "amax": "largest", "scale": "last", "elements": "sum", "overflow": "sum", "underflow": "sum", "sqnr": "least",
    "blocks": "sum", "at_ends": "sum",
}  # fmt: skip
LATER = ("blocks", "at_ends")  # fields that older files do not have


def refresh(folder: Path) -> Path:
    """Write the page of a dump folder again, with what was recorded since, and return its path."""
    path = folder / "report.html"
    with written_beside(path, sync=False) as part:
        write_page(folder, part)
    return path


def write_page(folder: Path, path: Path) -> None:
    path.write_text(page(load(folder)), encoding="utf-8")


def load(folder: Path) -> dict[str, Any]:
    """Read what the page shows from the files of a dump folder; only ``report.json`` must exist."""
    report = read_json(folder / "report.json")
    graphs = folder / "graphs.json"
    return {
        "folder": folder.name,
        "report": report,
        "graphs": read_json(graphs) if graphs.exists() else {"strings": [""], "stages": []},
        "passes": read_passes(folder / PASSES_FILE),
    }


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; a ValueError says what is wrong with it."""
    return json_files.read_json(path, "Expected an object as fp8_compile dumps it: dump again")


def page(data: dict[str, Any]) -> str:
    """The whole file as text."""
    parts = {
        "style": source("page.css"),
        "data": embedded(data),
        "script": "\n".join(source(name) for name in SCRIPTS),
    }
    text = source("page.html")
    for name, part in parts.items():
        before, marker, after = text.partition(f"/*{{{{{name}}}}}*/")
        assert marker, f"page.html has no place for {name}"
        text = before + part + after
    return text


def source(name: str) -> str:
    return (importlib.resources.files("fp8_compile.reporting") / "page" / name).read_text(encoding="utf-8")


def embedded(data: Any) -> str:
    """Return JSON that no HTML parser takes for markup, whatever names it holds: ``<`` can't end the script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def read_passes(path: Path) -> dict[str, Any] | None:
    """Recorded passes by column: ``label[t]`` and ``amax[slot][t]`` and so on; None where nothing was recorded."""
    if not path.is_file():
        return None
    if (size := path.stat().st_size) > MOST_PASSES_BYTES:
        raise ValueError(f"{path} has {size:,} bytes; expected at most {MOST_PASSES_BYTES:,}. Delete it")
    lines = path.read_bytes().splitlines()
    moments = []
    for number, line in enumerate(lines):
        try:
            moments.append(json_files.parse_json(line, f"{path}, line {number + 1}", "Delete it"))
        except ValueError:
            if number == len(lines) - 1:  # the process died while writing it
                break
            raise
    if len(moments) < 2:
        return None
    try:
        return _columns(*moments)
    except (KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{path} is no record of passes: {type(error).__name__} {error}. Delete it") from error


def _columns(head: dict[str, Any], *moments: dict[str, Any]) -> dict[str, Any]:
    most = min(MOST_MOMENTS, max(FEWEST_MOMENTS, MOST_POINTS // max(1, len(head["slots"]))))
    buckets = list(_buckets(moments, most))
    by_step = all(moment["step"] is not None for moment in moments)
    return {
        "slots": head["slots"],
        "largest": head["largest"],
        "axis": "step" if by_step else "pass",
        "label": [bucket[-1]["step" if by_step else "pass"] for bucket in buckets],
        **{
            field: [
                [_joined(how, [moment[field][slot] for moment in bucket]) for bucket in buckets]
                for slot in range(len(head["slots"]))
            ]
            for field, how in KEPT.items()
            if field not in LATER or all(field in moment for moment in moments)
        },
    }


def _buckets(moments: Sequence[Any], most: int) -> list[Sequence[Any]]:
    if len(moments) <= most:
        return [[moment] for moment in moments]
    edges = [round(index * len(moments) / most) for index in range(most + 1)]
    return [moments[start:end] for start, end in zip(edges, edges[1:])]


def _joined(how: str, values: Sequence[Any]) -> Any:
    """Join several moments so that the worst can still be seen: Inf and NaN, else the largest, sum, least or last."""
    known = [value for value in values if value is not None]
    bad = [value for value in known if isinstance(value, str)]
    if not known:
        return None
    if how == "last" or len(known) == 1:
        return known[-1]
    if how == "least":  # the noise of an empty tensor is "inf" or "nan", which is harmless
        numbers = [value for value in known if not isinstance(value, str)]
        return min(numbers) if numbers else known[-1]
    if bad:
        return bad[-1]
    return max(known) if how == "largest" else sum(known)
