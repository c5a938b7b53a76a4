"""Reports that outlive the process, beside Inductor's cache.

On a warm cache no pass runs, yet the user wants to know what the code does. The report of a graph is stored under
a hash of that graph. It holds a random word that is part of the graph's key in Inductor's cache: so code found
there always has its report, and a report that was lost means that the graph is compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import secrets
from typing import Any, Sequence

import torch
from torch import fx

from fp8_compile.report import Report
from fp8_compile.torch_internals.inductor import cache_folder
from fp8_compile.whole_files import written_beside


@dataclasses.dataclass(frozen=True)
class ReportCache:
    """One graph's place in the cache."""

    path: pathlib.Path
    key: str  # for Inductor's cache
    word: str
    stored: dict[str, Any] | None

    @classmethod
    def entry(cls, gm: fx.GraphModule, example_inputs: Sequence[Any], key: str) -> ReportCache:
        inputs = [_describe(item) for item in example_inputs]
        text = repr((key, str(gm.graph), inputs, torch.is_grad_enabled(), torch.__version__))
        digest = hashlib.sha256(text.encode()).hexdigest()
        path = pathlib.Path(cache_folder()) / "fp8_compile" / f"{digest}.json"
        stored = _load(path)
        word = stored["word"] if stored else secrets.token_hex(8)
        return cls(path, key + word, word, stored)

    def read(self) -> Report:
        assert self.stored is not None, "Inductor's cache knew a graph whose report we never wrote"
        return dataclasses.replace(Report.from_dict(self.stored["report"]), cache="hit")

    @property
    def slots(self) -> list[Any]:
        """Where the code keeps its scaling state; see ``GraphSlots.to_list``."""
        assert self.stored is not None
        return self.stored["slots"]

    @property
    def weights(self) -> list[Any]:
        """Which weights the code reads from the cache of them; see ``GraphWeights.to_list``."""
        assert self.stored is not None
        return self.stored["weights"]

    @property
    def grids(self) -> list[Any]:
        """How the code quantizes weights; see ``WeightGrid.to_list``."""
        assert self.stored is not None
        return self.stored["grids"]

    def write(
        self, report: Report, slots: list[Any], weights: Sequence[Any] = (), grids: Sequence[Any] = ()
    ) -> None:
        """Best effort: without it the next process compiles again."""
        lists = {"slots": slots, "weights": list(weights), "grids": list(grids)}
        data = {"word": self.word, "report": report.to_dict(), **lists}
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with written_beside(self.path, sync=False, own_part=True) as part:
                part.write_text(json.dumps(data))


def _load(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text())
        Report.from_dict(data["report"])
        lists = all(isinstance(data[name], list) for name in ("slots", "weights", "grids"))
        return data if isinstance(data["word"], str) and lists else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _describe(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return str(item.dtype), str(item.device), str(tuple(item.shape)), str(item.stride()), item.requires_grad
    return str(item)
