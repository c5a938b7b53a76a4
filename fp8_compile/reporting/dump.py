"""Dumps: what the compiler passes did to one graph, in files that people and programs can read."""

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
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from fp8_compile.passes.graph.roles import Names
from fp8_compile.scaling.recorder import FILE as RECORD
from fp8_compile.whole_files import written_beside

from .graph_stages import Stage, capture, encode, mark_sites, name_slots, saved_for_backward, slots_by_site
from .precision_graph import write_dot, write_graphml
from .report_page import refresh, write_page
from .traffic import estimate

if TYPE_CHECKING:
    from fp8_compile.report import Report

logger = logging.getLogger("fp8_compile")

WHOLE_GRAPHS = ("joint", "inference")  # phases before the graph is split
REWRITES = ("RewriteMatmuls", "ShareQuantizes")  # the graph after the last of these shows best what was rewritten
LONGEST_PASS_NAME = 80  # a file name may have 255 bytes


class _Step(NamedTuple):
    """The graph as last written: what the next pass is compared with."""

    number: int
    file: str
    text: str


class GraphDump:
    """The folder of one compiled graph::

        graph_000/joint.00_before.py             the graph as it came in
                  joint.01_rewrite_matmuls.py    after each pass that changed it
                  joint.01_rewrite_matmuls.diff  and what that pass changed
                  joint.before.graphml  .dot     see precision_graph.py
                  joint.graphml  joint.dot       the same after all passes
                  report.json  report.txt        every matmul and what became of it
                  graphs.json                    the graphs of report.html, see graph_stages.py
                  passes.jsonl                   amaxes and scales over time, see scaling/recorder.py; of the first
                                                 module that runs the graph, passes.1.jsonl of the second
                  report.html                    all of it as a page to look at

    A file is written completely or not at all. When the disk fails in the middle of a run, one warning is logged and
    the dump writes nothing from then on; training continues.
    """

    def __init__(self, path: Path, names: Names | None = None) -> None:
        self.path, self._names = path, names
        self._latest: dict[str, _Step] = {}
        self._stages: dict[str, Stage] = {}
        self._saved: dict[str, int] | None = None
        self._report: Report | None = None
        self.slot_names: dict[str, str] = {}  # of quantized tensors, once the graph is compiled
        self.modules: list[str] = []  # that run the graph
        self._stopped = False

    @classmethod
    def create(cls, folder: str | os.PathLike[str], names: Names | None = None) -> GraphDump:
        """Take the next free ``folder/graph_NNN``, and create ``folder`` if it does not exist. ``names`` knows
        which module a node comes from."""
        # Absolute: a script that changes directory between two compilations still gets one folder.
        root = Path(os.path.abspath(os.path.expanduser(folder)))
        try:
            root.mkdir(parents=True, exist_ok=True)
            for number in itertools.count():
                path = root / f"graph_{number:03d}"
                # mkdir either creates the folder or fails, so two processes never get the same one.
                with contextlib.suppress(FileExistsError):
                    path.mkdir()
                    return cls(path, names)
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
        if phase in WHOLE_GRAPHS and "before" not in self._stages:  # a subgraph comes after the graph that holds it
            self._capture("before", "As it came", graph)

    def ran(self, phase: str, pass_name: str, graph: fx.Graph, changed: bool) -> None:
        """Write the graph after a pass that changed it, and the difference. :meth:`started` was called before."""
        if self._stopped:
            return
        if phase in WHOLE_GRAPHS and pass_name in REWRITES and "lowered" not in self._stages:
            self._capture("rewritten", "Rewritten", graph)
        if not changed:
            return
        before = self._latest[phase]
        stem = f"{phase}.{before.number + 1:02d}_{_snake_case(pass_name)}"
        after = _Step(before.number + 1, f"{stem}.py", readable(graph))
        self._latest[phase] = after
        self._write(after.file, after.text)
        self._write(f"{stem}.diff", _difference(before, after))

    def finished(self, phase: str, graph: fx.Graph) -> None:
        """Draw the graph after all passes."""
        if self._stopped:
            return
        self._draw(phase, graph)
        if phase in WHOLE_GRAPHS and "lowered" not in self._stages:
            self._capture("lowered", "Lowered for the target", graph)
        elif phase not in WHOLE_GRAPHS:
            self._capture(phase, f"{phase.capitalize()}, as compiled", graph)
        if phase == "forward":
            self._saved = saved_for_backward(graph)
        if self._report is not None:  # a backward that is compiled when it first runs
            self.write_report(self._report)

    @property
    def trains(self) -> bool:
        """True if the graph has a backward."""
        return "joint" in self._latest

    @staticmethod
    def refresh_page(folder: Path) -> None:
        """Write the page of a dump folder again, with what was recorded since."""
        refresh(folder)

    def add_module(self, name: str) -> Path:
        """One more module runs the graph; where its amaxes and scales may be recorded."""
        number = len(self.modules)
        self.modules.append(name)
        if self._report is not None:
            self.write_report(self._report)
        return self.path / (RECORD if number == 0 else f"{Path(RECORD).stem}.{number}{Path(RECORD).suffix}")

    def write_report(self, report: Report) -> None:
        """Write the report and the page; called again when a later graph, such as a backward, has been compiled."""
        self._report = report
        data = {**report.to_dict(), **self._figures(report), "modules": self.modules}
        self._write("report.json", json.dumps(data, indent=2) + "\n")
        self._write("report.txt", f"{report}\n")
        self._write("graphs.json", json.dumps(encode(list(self._stages.values())), separators=(",", ":")) + "\n")
        if not self._stopped:
            self._save("report.html", lambda path: write_page(self.path, path))

    def _figures(self, report: Report) -> dict[str, Any]:
        """Return what the page shows in addition to the rows."""
        sites = {row.node for row in report.rewritten}
        for stage in self._stages.values():
            name_slots(stage, self.slot_names)
            mark_sites(stage, {row.node: row.gemm for row in report.rows}, sites)
        before, rewritten = self._stages.get("before"), self._stages.get("rewritten")
        if before is None or rewritten is None:
            return {"traffic": None, "saved_for_backward": self._saved, "slots": {}}
        # A subgraph's matmuls are in the report, but their nodes are not in this graph.
        traffic = estimate(before, rewritten, sites & set(before.by_name))
        return {
            "traffic": traffic.to_dict(),
            "saved_for_backward": self._saved,
            "slots": slots_by_site(rewritten),
        }

    def _capture(self, id: str, title: str, graph: fx.Graph) -> None:
        self._stages[id] = capture(graph, id, title, self._names)

    def _draw(self, stem: str, graph: fx.Graph) -> None:
        self._save(f"{stem}.graphml", lambda path: write_graphml(graph, path))
        self._save(f"{stem}.dot", lambda path: write_dot(graph, path))

    def _write(self, name: str, text: str) -> None:
        # A name can hold half a surrogate pair, which UTF-8 refuses.
        self._save(name, lambda path: path.write_text(text, encoding="utf-8", errors="backslashreplace"))

    def _save(self, name: str, write: Callable[[Path], object]) -> None:
        """Write to a temporary file and move it into place, so that a viewer never reads half of it."""
        if self._stopped:
            return
        path = self.path / name
        try:
            with written_beside(path, sync=False) as part:
                write(part)
        except OSError as error:
            self._stopped = True
            logger.warning("cannot write %s: %s. This graph is not dumped any further; training goes on", path, error)


def readable(graph: fx.Graph) -> str:
    """Return the graph as Python, each value with dtype, shape and strides (``_scaled_mm`` depends on those)."""
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
