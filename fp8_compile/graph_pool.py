"""The part of a model's scaling state that one graph is compiled with."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Container, Iterable

from torch import Tensor

from fp8_compile.passes.find_matmuls import Role
from fp8_compile.passes.slot import Place, Slot, buffer_name

from .scaling_page import Page, PageKind

if TYPE_CHECKING:
    from .scaling_state import ScalingState


class PoolFull(Exception):
    """A graph has more quantized tensors than was foreseen: ``needed`` rows would do."""

    def __init__(self, direction: str, needed: int) -> None:
        super().__init__(direction, needed)
        self.direction, self.needed = direction, needed


class GraphPool:
    """The slots of one graph: places in pages of the model's state. ``buffers`` are the tensors that it is given."""

    def __init__(self, state: ScalingState, kinds: Iterable[PageKind], room: int, modules: Container[str] = ()) -> None:
        """``room``: how many slots the graph may need. A graph whose ``modules`` have slots already, from a graph for
        other sizes, will hardly need new ones."""
        self.state, self.places = state, dict[Slot, Place]()
        self._kinds = {kind.direction: kind for kind in kinds}
        self._pages: dict[str, list[int]] = {}
        for kind in self._kinds.values():
            pages = [index for index, page in enumerate(state.pages) if page.kind == kind]
            known = any(slot.module in modules for index in pages for slot in state.pages[index].slots)
            self._pages[kind.direction] = pages
            self.make_room(kind.direction, 0 if known else room)
        self.fingerprint = repr(
            [(index, state.pages[index].capacity, state.pages[index].slots) for index in sum(self._pages.values(), [])]
        )

    def make_room(self, direction: str, room: int) -> None:
        """A page more unless the last one has that many rows left."""
        kind, pages = self._kinds[direction], self._pages[direction]
        last = self.state.pages[pages[-1]] if pages else None
        if last is None or last.capacity - len(last.slots) < room:
            self.state.pages.append(Page(kind, room, self.state.unit(kind.direction)))
            pages.append(len(self.state.pages) - 1)

    def buffers(self, fields: Iterable[str]) -> dict[str, Tensor]:
        """Name in the graph -> tensor."""
        return {
            buffer_name(direction, index, field): getattr(self.state.pages[index], field)
            for direction, pages in self._pages.items()
            for index in pages
            for field in fields
        }

    def pages(self, direction: str) -> list[int]:
        """The pages that the graph is given."""
        return self._pages[direction]

    def place(self, slot: Slot) -> Place:
        pages = self._pages[slot.direction]
        for index in pages:
            page = self.state.pages[index]
            if slot in page.slots:
                return self._placed(slot, Place(index, page.slots.index(slot)))
        page = self.state.pages[pages[-1]]
        if len(page.slots) == page.capacity:
            raise PoolFull(slot.direction, 2 * page.capacity)
        page.slots.append(slot)
        row = len(page.slots) - 1
        self.state.take_waiting(slot, page, row)
        return self._placed(slot, Place(pages[-1], row))

    def _placed(self, slot: Slot, place: Place) -> Place:
        self.places[slot] = place
        return place

    def to_list(self) -> list[Any]:
        """Plain data for the report cache: what a graph from Inductor's cache has built in."""
        return [
            [slot.module, slot.ordinal, str(slot.role), slot.part, dataclasses.astuple(place)]
            for slot, place in self.places.items()
        ]

    def adopt(self, stored: Iterable[Any]) -> None:
        """Take the places that code from Inductor's cache was compiled with."""
        for module, ordinal, role, part, place in stored:
            given = self.place(Slot(module, ordinal, Role(role), part))
            assert dataclasses.astuple(given) == tuple(place), "the cache's key covers the places of all slots"
