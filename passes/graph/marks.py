"""What our passes note about a node: one ``Mark``, under ``meta["fp8"]``.

Where a mark survives: the partitioner copies ``node.meta``, so that a mark is still there in both halves of the graph.
A placeholder that stands for a saved tensor has the mark of that tensor, which is why ``marked`` is about calls alone.
Inductor merges equal nodes, and what is left has the mark of one of them: nodes of two kinds that must be told apart
must not be equal.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch import fx

if TYPE_CHECKING:
    from .row import Gemm
    from .slot import TensorUse

KEY = "fp8"  # in node.meta
AMAX = 2  # a value of ``Mark.scale``, beside QUANT and DEQUANT of kernels/delayed_scaling.py


class Kind(enum.StrEnum):
    """What a node is part of."""

    GEMM = "gemm"  # an FP8 gemm of ours; a model may have its own
    SCALES = "scales"  # the half of a lowered quantize that computes amax and scales
    CAST = "cast"  # the half that computes the FP8 values
    RELAYOUT = "relayout"  # a copy of an FP8 tensor in a gemm's layout
    RECOMPUTE_COPY = "recompute copy"  # of a backward gemm's operand, for the partitioner: joint/allow_recompute.py
    ALPHA = "alpha"  # what a gemm multiplies its product by: split/stack_alphas.py
    OVERFLOW = "overflow"  # computes the largest magnitude of a gradient


@dataclasses.dataclass(frozen=True)
class Mark:
    """Notes on one node; a field that was not noted has its default.

    ``site``, ``module`` and ``gemm`` say for which matmul a node was made. Everything that is made in the place of a
    marked node inherits them (``emit``), through all passes and both halves: that is how the report finds a gemm.
    """

    site: str = ""  # name of the matmul's node in the graph as it came
    module: str = ""
    gemm: Gemm | None = None
    kind: Kind | None = None
    # Of a quantize, until it is lowered.
    use: TensorUse | None = None  # the tensor that it quantizes
    stochastic: bool = False  # it rounds at random
    reads_forwards: bool = False  # it is a backward gemm's, which reads the bytes that forward writes
    saved: bool = False  # its result is to be saved for backward
    # Of SCALES and CAST.
    quantize: tuple[torch.dtype, tuple[int, int]] | None = None  # format and block of the quantize that was lowered
    scale: int | None = None  # which result of the formula it is: QUANT, DEQUANT or AMAX
    delayed: int | None = None  # number of the quantize, where its scale comes from the state
    # Of RELAYOUT.
    relayout: tuple[bool, int, int] | None = None  # transposed, row_multiple, col_multiple


UNMARKED = Mark()


def mark_of(node: fx.Node) -> Mark:
    """The mark of a node, an empty one if it has none."""
    mark: Mark = node.meta.get(KEY, UNMARKED)
    return mark


def set_mark(node: fx.Node, **fields: Any) -> None:
    """Set these fields of a node's mark, and leave the others."""
    node.meta[KEY] = dataclasses.replace(mark_of(node), **fields)


def marked(node: fx.Node, kind: Kind) -> bool:
    """True for a call that is part of a ``kind``; a placeholder that stands for a saved tensor is not."""
    return node.op == "call_function" and mark_of(node).kind is kind


def quantize_of(node: fx.Node) -> tuple[torch.dtype, tuple[int, int]]:
    """Format and block of the quantize that a node was lowered from."""
    quantize = mark_of(node).quantize
    assert quantize is not None, node.format_node()
    return quantize


def inherited(mark: Mark | None, like: fx.Node) -> Mark | None:
    """``mark`` with the matmul that ``like`` was made for; None where there is nothing to note."""
    matmul = mark_of(like)
    if mark is None and not (matmul.site or matmul.module or matmul.gemm):
        return None
    return dataclasses.replace(mark or UNMARKED, site=matmul.site, module=matmul.module, gemm=matmul.gemm)


def source_through(node: fx.Node, is_part: Callable[[fx.Node], bool]) -> fx.Node:
    """The node that a chain of parts starts from, following first arguments. A part that reads no node is the source
    itself: Inductor folds what is computed from constants, such as the zeros that a recurrence begins with."""
    while is_part(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def source_of(node: fx.Node, kind: Kind) -> fx.Node:
    """The tensor that the nodes of a ``kind``, of which this is the last, are computed from."""
    return source_through(node, lambda one: marked(one, kind))
