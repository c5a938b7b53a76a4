"""Rows of ragged groups in a graph, moved to where each group is filled up, and back: ``kernels/padded_groups.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8_compile.kernels.padded_groups import layout, take_rows

from .emit import NEVER_SAVED, inline, value


class PaddedGroups:
    """The layouts of a graph's groups: products with the same offsets and number of rows share one."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[Any, tuple[fx.Node, fx.Node, fx.Node]] = {}

    def ends(self, offsets: fx.Node, x: fx.Node, multiple: int) -> fx.Node:
        """Where the groups of x's rows end once they are filled up."""
        return self._layout(offsets, x, multiple)[0]

    def fill(self, x: fx.Node, offsets: fx.Node, multiple: int, *, like: fx.Node) -> fx.Node:
        """x with each group of rows filled up."""
        _, source, _ = self._layout(offsets, x, multiple)
        filled: fx.Node = inline(self.graph, take_rows, x, source, like=like)
        return filled

    def cut(self, y: fx.Node, x: fx.Node, offsets: fx.Node, multiple: int, *, like: fx.Node) -> fx.Node:
        """The rows of y, which was made of x filled up, that x has. Where backward needs them, y is saved: to store
        what is cut would be a kernel of its own, where each reader can read y through the index."""
        *_, place = self._layout(offsets, x, multiple)
        cut: fx.Node = inline(self.graph, take_rows, y, place, like=like, tags=NEVER_SAVED)
        return cut

    def _layout(self, offsets: fx.Node, x: fx.Node, multiple: int) -> tuple[fx.Node, fx.Node, fx.Node]:
        key = offsets, str(value(x).shape[0]), multiple
        if key not in self.made:
            self.made[key] = inline(self.graph, _layout_for, offsets, x, multiple, like=x)
        return self.made[key]


def _layout_for(offsets: torch.Tensor, x: torch.Tensor, multiple: int) -> tuple[torch.Tensor, ...]:
    return layout(offsets, x.shape[0], multiple)
