"""One line of the report: what became of one matmul, and why."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from torch import fx

Gemm = Literal["output", "grad_input", "grad_weight"]
REWRITTEN, SKIPPED = "rewritten", "skipped"


@dataclasses.dataclass(frozen=True)
class Row:
    """What was decided for one matmul of the graph.

    ``shape`` is (M, N, K) for an ``[M, K] @ [K, N]`` product, with the batch in front where there is one;
    a dimension that is not known when compiling is its symbol's name.
    """

    module: str  # dotted name of the module that wrote the matmul; "" is the compiled module itself
    gemm: Gemm
    shape: tuple[int | str, ...]
    decision: str  # REWRITTEN or SKIPPED
    reason: str
    op: str = "mm"  # the aten op as it was found
    weight: str = ""  # dotted name of the parameter, where one operand is a parameter
    formats: tuple[str, ...] = ()  # e.g. ("e4m3", "e5m2"): left and right operand, where rewritten
    node: str = ""  # its name in the graph before all passes; what replaces it has it in its mark: Mark.site
    code: str = ""  # 'model.py:12 return self.up(x)': the line that wrote it, or the forward it is the gradient of

    @property
    def rewritten(self) -> bool:
        return self.decision == REWRITTEN


def code_line(node: fx.Node) -> str:
    """'model.py:12 return self.up(x)', the innermost line of the user's that a node came from; "" if unknown."""
    frames = _frames(node)
    if not frames:
        return ""
    file, line, text = frames[-1]
    return f"{file.rpartition('site-packages/')[2]}:{line} {text.strip()}"


def code_path(node: fx.Node) -> str:
    """'model.py:12 mlp.py:30': the line that a node came from, after the lines that called it; "" if unknown."""
    return " ".join(f"{file.rpartition('/')[2]}:{line}" for file, line, _ in _frames(node))


def _frames(node: fx.Node) -> list[tuple[str, str, str]]:
    """(file, line, text) of each frame, outermost first."""
    return re.findall(r'File "([^"\n]*)", line (\d+), in [^\n]*\n([^\n]*)', node.meta.get("stack_trace") or "")
