"""What every pass has: a name, one method, and a report of what it did."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

from torch import fx


@dataclasses.dataclass(frozen=True)
class PassReport:
    """How many places of the graph a pass changed, and what they were."""

    changes: int
    what: str

    def __str__(self) -> str:
        return f"{self.changes} {self.what}"


class GraphPass(abc.ABC):
    """One rewrite of a graph, in place. The docstring of a pass is the graph before and after.

    ``leaves_no``: operations, and kinds of marks, that no node has after the pass (``invariants.py`` checks it).
    """

    leaves_no: ClassVar[tuple[Any, ...]] = ()

    @property
    def name(self) -> str:
        return type(self).__name__

    @abc.abstractmethod
    def run(self, graph: fx.Graph) -> PassReport:
        """Change the graph; the pipeline logs the report, dumps the result and cleans up dead nodes."""
