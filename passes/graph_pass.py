"""What every pass has: a name, one method, and a word on what it did."""

from __future__ import annotations

import abc
import dataclasses

from torch import fx


@dataclasses.dataclass(frozen=True)
class PassReport:
    """How many places of the graph a pass changed, and what they were."""

    changes: int
    what: str

    def __str__(self) -> str:
        return f"{self.changes} {self.what}"


class GraphPass(abc.ABC):
    """One rewrite of a graph, in place. The docstring of a pass is the graph before and after."""

    @property
    def name(self) -> str:
        return type(self).__name__

    @abc.abstractmethod
    def run(self, graph: fx.Graph) -> PassReport:
        """Change the graph; the pipeline logs the report, dumps the result and cleans up dead nodes."""
