"""The report: what became of every matmul of a model, and why."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Iterable, Sequence

from .passes.graph.row import Row

REASONS_IN_SUMMARY = 4


@dataclasses.dataclass(frozen=True)
class Report:
    """Rows of one compiled graph, or of all graphs of a model (see :func:`fp8_compile.explain`)."""

    rows: tuple[Row, ...]
    recipe: str
    target: str
    cache: str = "miss"  # "miss": passes ran; "hit": Inductor's cache had the code; "off"; "not compiled": explain
    graphs: int = 1

    @property
    def rewritten(self) -> list[Row]:
        return [row for row in self.rows if row.rewritten]

    @property
    def skipped(self) -> list[Row]:
        return [row for row in self.rows if not row.rewritten]

    def summary(self) -> str:
        """``rewrote 63 of 66 matmuls (lm_head: excluded; gate: N=10 is below min_dim=16)``."""
        line = f"rewrote {len(self.rewritten)} of {len(self.rows)} matmuls"
        reasons = _reasons_by_module(self.skipped)
        shown = [f"{where}: {reason}" for where, reason in reasons[:REASONS_IN_SUMMARY]]
        if len(reasons) > REASONS_IN_SUMMARY:
            shown.append(f"{len(reasons) - REASONS_IN_SUMMARY} more reasons")
        if shown:
            line += f" ({'; '.join(shown)})"
        if self.cache == "hit":
            line += ", code from Inductor's cache"
        return line

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; :meth:`from_dict` reads it back."""
        return {
            "recipe": self.recipe,
            "target": self.target,
            "cache": self.cache,
            "graphs": self.graphs,
            "matmuls": len(self.rows),
            "rewritten": len(self.rewritten),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        """Invert :meth:`to_dict`; a ValueError says if something is missing or of another type."""
        rows = data.get("rows") if isinstance(data, dict) else None
        if not isinstance(rows, list):
            raise ValueError(f"the report's rows are {type(rows).__name__}; expected a list")
        kept = {name: data.get(name) for name in ("recipe", "target", "cache", "graphs")}
        for name, value in kept.items():
            expected = int if name == "graphs" else str
            if not isinstance(value, expected) or isinstance(value, bool):
                raise ValueError(f"the report's {name} is {type(value).__name__}; expected {expected.__name__}")
        return cls(tuple(_row(number, row) for number, row in enumerate(rows)), **kept)  # type: ignore[arg-type]

    def __str__(self) -> str:
        header = ("module", "gemm", "shape MxNxK", "decision", "reason")
        cells = [
            (row.module or "(root)", row.gemm, "x".join(map(str, row.shape)), row.decision, row.reason)
            for row in self.rows
        ]
        table = align([header, *cells])
        table.insert(1, "-" * max(len(line) for line in table))
        return "\n".join([*table, self.summary()])


def _row(number: int, data: Any) -> Row:
    fields = {field.name: field for field in dataclasses.fields(Row)}
    needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    if not isinstance(data, dict) or not needed <= set(data) <= set(fields):
        raise ValueError(f"row {number} of the report has other fields than {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        several, kinds = name in ("shape", "formats"), (int, str) if name == "shape" else (str,)
        items = value if several and isinstance(value, (list, tuple)) else [None] if several else [value]
        if not all(isinstance(one, kinds) for one in items):
            raise ValueError(f"row {number} of the report has {type(value).__name__} as its {name}")
        values[name] = tuple(value) if several else value
    return Row(**values)


def merge(reports: Sequence[Report], *, cache: str) -> Report:
    """Join the reports of all graphs of a model."""
    if not reports:
        raise ValueError("no graph was traced: the model ran nothing that torch.compile captures")
    rows = tuple(row for report in reports for row in report.rows)
    return Report(rows, reports[0].recipe, reports[0].target, cache, len(reports))


def _reasons_by_module(rows: Iterable[Row]) -> list[tuple[str, str]]:
    """Return (modules, reason) pairs with each reason once; if many modules share a reason they are counted."""
    modules: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for row in rows:
        modules[row.reason][row.module or "(root)"] = None
    return [
        (next(iter(names)) if len(names) == 1 else f"{next(iter(names))} and {len(names) - 1} more", reason)
        for reason, names in modules.items()
    ]


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
