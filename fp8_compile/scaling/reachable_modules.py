"""Which modules a compiled function runs, as far as its closure and its object tell."""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8_compile.torch_internals.modules import unwrap


def reachable_modules(function: Any) -> list[nn.Module]:
    """The modules that a function has in its closure, or that the object has whose method it is."""
    owner = getattr(function, "__self__", None)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_full(cell)]
    seen = [owner, *vars(owner).values()] if hasattr(owner, "__dict__") else []
    candidates = [unwrap(item) for item in (*cells, *seen)]
    return [item for item in candidates if isinstance(item, nn.Module)]


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
