"""Dumps: what the passes made of one compiled graph, in files a person or a program can read."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import logging
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from .precision_graph import write_dot, write_graphml

if TYPE_CHECKING:
    from .report import Report

logger = logging.getLogger("fp8_compile")

LONGEST_PASS_NAME = 80  # a file name may have 255 bytes


class _Step(NamedTuple):
    """The graph as last written: what the next pass is compared with."""

    number: int
    file: str
    text: str


class GraphDump:
    """One compiled graph's folder::

        graph_000/joint.00_before.py             the graph as it came
                  joint.01_rewrite_matmuls.py    after each pass that changed it
                  joint.01_rewrite_matmuls.diff  and what that pass changed
                  joint.before.graphml  .dot     see precision_graph.py
                  joint.graphml  joint.dot       the same after all passes
                  report.json  report.txt

    A file is there as a whole or not at all. When the disk fails in the middle of a run, one warning is logged and
    the dump does nothing from then on: training goes on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._latest: dict[str, _Step] = {}
        self._stopped = False

    @classmethod
    def create(cls, folder: str | os.PathLike[str]) -> GraphDump:
        """Take the next free ``folder/graph_NNN``; ``folder`` is made where it does not exist."""
        # Absolute: a script that changes directory between two compiles still gets one folder.
        root = Path(os.path.abspath(os.path.expanduser(folder)))
        try:
            root.mkdir(parents=True, exist_ok=True)
            for number in itertools.count():
                path = root / f"graph_{number:03d}"
                # mkdir either makes the folder or fails, so two processes never get the same one.
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    return cls(path)
        except (OSError, ValueError) as error:  # ValueError: a null byte in the path
            raise ValueError(
                f"cannot write dumps to {str(root)!r}: {error}. Give a folder that can be written "
                "(options={'dump': folder} or FP8_COMPILE_DUMP), or leave it out to dump nothing"
            ) from error
        raise AssertionError("unreachable: itertools.count does not end")

    def started(self, phase: str, graph: fx.Graph) -> None:
        """Write the graph before all passes; ``phase`` is "joint", "forward", "backward" or "inference"."""
        if self._stopped:
            return
        step = _Step(0, f"{phase}.00_before.py", readable(graph))
        self._latest[phase] = step
        self._write(step.file, step.text)
        self._draw(f"{phase}.before", graph)

    def ran(self, phase: str, pass_name: str, graph: fx.Graph, changed: bool) -> None:
        """Write the graph after a pass that changed it, and the difference; :meth:`started` has come before."""
        if self._stopped or not changed:
            return
        before = self._latest[phase]
        stem = f"{phase}.{before.number + 1:02d}_{_snake_case(pass_name)}"
        after = _Step(before.number + 1, f"{stem}.py", readable(graph))
        self._latest[phase] = after
        self._write(after.file, after.text)
        self._write(f"{stem}.diff", _difference(before, after))

    def finished(self, phase: str, graph: fx.Graph) -> None:
        """Draw the graph after all passes."""
        if not self._stopped:
            self._draw(phase, graph)

    def write_report(self, report: Report) -> None:
        self._write("report.json", json.dumps(report.to_dict(), indent=2) + "\n")
        self._write("report.txt", f"{report}\n")

    def _draw(self, stem: str, graph: fx.Graph) -> None:
        self._save(f"{stem}.graphml", lambda path: write_graphml(graph, path))
        self._save(f"{stem}.dot", lambda path: write_dot(graph, path))

    def _write(self, name: str, text: str) -> None:
        # A name can hold half a surrogate pair, which UTF-8 refuses.
        self._save(name, lambda path: path.write_text(text, encoding="utf-8", errors="backslashreplace"))

    def _save(self, name: str, write: Callable[[Path], object]) -> None:
        """Write beside the file and move it into place, so that a viewer never reads half of it."""
        if self._stopped:
            return
        path, part = self.path / name, self.path / f".{name}.part"
        try:
            write(part)
            os.replace(part, path)
        except OSError as error:
            self._stopped = True
            with contextlib.suppress(OSError):
                part.unlink()
            logger.warning("cannot write %s: %s. This graph is not dumped any further; training goes on", path, error)


def readable(graph: fx.Graph) -> str:
    """The graph as Python, each value with its dtype, shape and strides (``_scaled_mm`` is particular about those)."""
    owner = graph.owning_module
    if owner is not None and owner.graph is graph:
        text = owner.print_readable(print_output=False, include_stride=True)
    else:
        body = graph.python_code("self", verbose=True, include_stride=True).src
        text = "class GraphModule(torch.nn.Module):\n" + textwrap.indent(body.lstrip("\n"), "    ")
    return text.rstrip() + "\n"


def _difference(before: _Step, after: _Step) -> str:
    # split, not splitlines: a form feed in a name does not end a line.
    old, new = before.text.split("\n"), after.text.split("\n")
    lines = difflib.unified_diff(old[:-1], new[:-1], before.file, after.file, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _snake_case(name: str) -> str:
    """``RewriteMatmuls`` becomes ``rewrite_matmuls``, ``LowerFP8ForCPU`` becomes ``lower_fp8_for_cpu``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_")[:LONGEST_PASS_NAME] or "pass"
