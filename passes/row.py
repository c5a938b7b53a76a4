"""One line of the report: what became of one matmul, and why."""

from __future__ import annotations

import dataclasses
from typing import Literal

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

    @property
    def rewritten(self) -> bool:
        return self.decision == REWRITTEN
