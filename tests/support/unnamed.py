"""Graphs that no model stands behind: what passes ask of names is the same for every node."""

from __future__ import annotations

import dataclasses

from torch import fx


@dataclasses.dataclass(frozen=True)
class Unnamed:
    """In place of ``ModuleNames``: every node is in ``module``, every placeholder is a buffer or none is."""

    module: str = ""
    buffers: tuple[str, ...] | None = None  # what a placeholder is called as a buffer; None: nothing is a buffer

    def module_of(self, node: fx.Node) -> str:
        return self.module

    def parameters_of(self, placeholder: fx.Node) -> tuple[str, ...]:
        return ()

    def weights_of(self, placeholder: fx.Node) -> tuple[str, ...]:
        return ()

    def buffers_of(self, placeholder: fx.Node) -> tuple[str, ...]:
        return self.buffers or ()

    def is_buffer(self, placeholder: fx.Node) -> bool:
        return self.buffers is not None
