"""What packing made of each weight."""

from __future__ import annotations

import dataclasses

from fp8_compile.report import align


@dataclasses.dataclass(frozen=True)
class PackRow:
    """One weight, of a linear layer or another: packed, or left alone for a reason."""

    name: str
    shape: tuple[int, ...]  # (N, K), of a stack (E, N, K); as it is stored if it is neither
    format: str = ""  # "" where it was left alone
    method: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    error: float = float("nan")  # relative, of the output on the calibration's inputs, or of the weight
    reason: str = ""

    @property
    def packed(self) -> bool:
        return bool(self.format)


@dataclasses.dataclass(frozen=True)
class PackReport:
    """One row per weight; ``str()`` is a table."""

    rows: tuple[PackRow, ...]

    @property
    def packed(self) -> list[PackRow]:
        return [row for row in self.rows if row.packed]

    @property
    def skipped(self) -> list[PackRow]:
        return [row for row in self.rows if not row.packed]

    def summary(self) -> str:
        """``packed 36 of 37 weights, 21.2 -> 6.0 MB (pooler.dense: excluded by 'pooler')``."""
        before, after = (sum(getattr(row, field) for row in self.packed) for field in ("bytes_before", "bytes_after"))
        line = f"packed {len(self.packed)} of {len(self.rows)} weights, {before / 1e6:.1f} -> {after / 1e6:.1f} MB"
        reasons = [f"{row.name}: {row.reason}" for row in self.skipped]
        return line + (f" ({'; '.join(reasons[:4])}{'; ...' if len(reasons) > 4 else ''})" if reasons else "")

    def __str__(self) -> str:
        header = ("layer", "shape NxK", "format", "method", "error", "reason")
        cells = [
            (row.name, "x".join(map(str, row.shape)), row.format or "-", row.method, _percent(row.error), row.reason)
            for row in self.rows
        ]
        table = align([header, *cells])
        table.insert(1, "-" * max(len(line) for line in table))
        return "\n".join([*table, self.summary()])


def _percent(error: float) -> str:
    return f"{100 * error:.2f} %" if error == error else ""
