"""Which frozen scale is that of a slot."""

from __future__ import annotations

from typing import Mapping

from fp8_compile.passes.graph.roles import Role
from fp8_compile.passes.graph.slot import Slot


def reach_of(slot: Slot, frozen: Mapping[str, float]) -> float | None:
    """The magnitude that a slot's scale reaches to, of those that are frozen by slot or layer; None if its own is not.

    Inference may come from another frame than training did, and number the uses of a weight from there. If training
    knows only one use, it is that one.
    """
    found = frozen.get(str(slot), frozen.get(slot.layer) if slot.role is Role.INPUT else None)
    if found is None:
        tensor = _without_use(str(slot))
        others = [reach for other, reach in frozen.items() if _without_use(other) == tensor]
        found = others[0] if len(others) == 1 else None
    return found


def _without_use(slot: str) -> tuple[str, str]:
    """``("blocks.0.up", "input")`` of ``blocks.0.up#0.input``."""
    name, _, rest = slot.rpartition("#")
    return name, rest.partition(".")[2]
