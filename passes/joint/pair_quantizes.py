"""Quantize a tensor in memory for both gemms that read it, with one read."""

from __future__ import annotations

import collections
import dataclasses
import operator
from typing import Any, Iterator

import torch
from torch import fx

from fp8_compile.kernels.quantize import WHOLE, quantize_op
from fp8_compile.kernels.quantize_both import DEQUANT, DEQUANT_T, Q_T, Q, quantize_both_op
from fp8_compile.torch_internals.graphs import OpOverload

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit, getitem, value
from ..graph.marks import Kind, Mark, mark_of, marked
from ..graph.producers import reductions_before
from ..graph.relayouts import relayout_arguments
from ..graph.views import PARTS, VIEWS, is_call_of
from ..graph_pass import GraphPass, PassReport
from .decide import TILE

aten, prims = torch.ops.aten, torch.ops.prims

# Block of a quantize -> (rows, contraction) of it as a gemm sees it, and whether gemms read it transposed.
GEMM_BLOCKS = {
    (1, WHOLE): ((1, WHOLE), {False}),
    (WHOLE, 1): ((1, WHOLE), {True}),
    (1, TILE): ((1, TILE), {False}),
    (TILE, 1): ((1, TILE), {True}),
    (TILE, TILE): ((TILE, TILE), {False, True}),
}
MULTIPLES = {False: (1,), True: (1, 16, TILE)}  # that the kernels fill q and q_t up to
CONVERT = prims.convert_element_type.default
VIEWS_AND_CASTS = VIEWS | PARTS | {CONVERT}
# Kernels that Inductor does not write: it fuses nothing into them, and their results are in memory.
EXTERN = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm", "convolution")
ATTENTION = "_scaled_dot_product"


class PairQuantizes(GraphPass):
    """Make one op of the quantizes of a tensor that is in memory: a weight, an input, a gradient, a gemm's result.

    Before:  q, s = quantize(w, e4m3, [128, 128])
             y = _scaled_mm(qx, permute(q), sx, tile_scales(s))
             dx = _scaled_mm(qg, permute(transposed_copy(q)), sg, tile_scales(permute(s)))
    After:   q, s, q_t, s_t = quantize_both(w, e4m3, [128, 128])
             y = _scaled_mm(qx, permute(q), sx, permute(s))
             dx = _scaled_mm(qg, permute(q_t), sg, permute(s_t))
    The same:  q, s = quantize(x, e4m3, [1, 128]);  q', s' = quantize(x, e4m3, [128, 1]);  and [1, -1] with [-1, 1]

    Inductor reads such a tensor up to three times, since its kernels go along neither a block of 128 nor a column. What
    it fuses into the kernel that computes a tensor (an activation, its gradient) is better left to it: ``find_stored``
    says which is which. Forward makes both results, and saves the transposed one for backward.

    Bytes per element of a bf16 tensor, as generated and as launched by ``LaunchQuantizes``:

                        both layouts      rows alone      columns alone
        128x128         8 -> 4            5 -> 3          5 -> 3
        1x128           8 -> 4            3 = 3           5 -> 3
        a row           8 -> 6            3 = 3           5 = 5
    """

    def run(self, graph: fx.Graph) -> PassReport:
        paired = 0
        for tensor in list(_tensors(graph)):
            if tensor.pays():
                tensor.replace(graph)
                paired += 1
        return PassReport(paired, "tensors in memory quantized with one read")


@dataclasses.dataclass(frozen=True)
class GemmOperand:
    """A gemm's left (0) or right (1) side."""

    gemm: fx.Node
    side: int
    transposed: bool  # it reads q_t
    multiple: int  # that its contraction is filled up to


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in memory as seen through ``views``, rounded to ``via`` on the way."""

    tensor: fx.Node
    views: tuple[fx.Node, ...]
    via: torch.dtype | None


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor in memory, its quantizes in one format, and all gemms that read them."""

    stored: Stored
    quantizes: list[fx.Node]
    operands: list[GemmOperand]
    block: tuple[int, int]  # (rows, contraction) as a gemm sees it

    def pays(self) -> bool:
        """True where the kernels move fewer bytes than Inductor's code, or as many where that code scatters them."""
        columns = any(operand.transposed for operand in self.operands)
        rows = not all(operand.transposed for operand in self.operands)
        if self.block == (TILE, TILE):
            return True
        if self.block == (1, TILE):
            return columns
        # The sum that is a bias's gradient goes over columns, like their amax, and would be one more read.
        return rows and columns and not _is_summed(self.stored)

    def replace(self, graph: fx.Graph) -> None:
        first = self.quantizes[0]
        multiple = max((operand.multiple for operand in self.operands), default=1)
        options = (first.args[1], list(self.block), multiple, self.stored.via)
        mark = Mark(use=mark_of(first).use)
        with graph.inserting_before(first):
            x = _viewed(graph, self.stored, like=first)
            both = emit(graph, quantize_both_op, x, *options, like=first, mark=mark)
            results = [getitem(graph, both, index) for index in range(4)]
            turned = [emit(graph, aten.permute.default, result, [1, 0], like=first) for result in results]
        for operand in self.operands:
            given = (results, turned)[operand.side]
            q, dequant = (Q_T, DEQUANT_T) if operand.transposed else (Q, DEQUANT)
            operand.gemm.update_arg(operand.side, given[q])
            operand.gemm.update_arg(operand.side + 2, given[dequant])


def _tensors(graph: fx.Graph) -> Iterator[Quantized]:
    """The tensors in memory that are quantized along rows, columns or tiles for gemms of ours alone."""
    groups: dict[Any, list[fx.Node]] = collections.defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=quantize_op):
        x, dtype, block = arguments(node)
        if tuple(block) in GEMM_BLOCKS and not mark_of(node).stochastic:
            groups[x, dtype, GEMM_BLOCKS[tuple(block)][0]].append(node)
    for (x, _, block), quantizes in groups.items():
        # The kernel of a norm goes along rows, which are longer than blocks: it would take a second kernel for the
        # rows' blocks and a third one for the columns'. The norm's output moves fewer bytes if it is stored and read
        # again, and so does the output of any other reduction.
        stored = find_stored(x) or (Stored(x, (), None) if block == (1, TILE) and reductions_before(x) else None)
        operands = [_operands(node) for node in quantizes]
        if stored is not None and None not in operands:
            yield Quantized(stored, quantizes, [operand for found in operands for operand in found or ()], block)


def find_stored(node: fx.Node) -> Stored | None:
    """The tensor in memory that a matrix is a view of; None where a kernel of Inductor's computes it."""
    views: list[fx.Node] = []
    casts: list[torch.dtype] = []
    while is_call_of(node, VIEWS_AND_CASTS):
        if node.target is CONVERT:
            casts.append(arguments(node)[1])
        else:
            views.append(node)
        node = input_of(node)
    if not _is_in_memory(node):
        return None
    dtype = value(node).dtype
    narrow = {cast for cast in casts if cast not in (torch.float32, dtype)}
    if not narrow:
        return Stored(node, tuple(reversed(views)), None)  # to FP32 and back changes nothing
    if len(narrow) == 1 and dtype is torch.float32 and narrow <= {torch.bfloat16, torch.float16}:
        return Stored(node, tuple(reversed(views)), narrow.pop())
    return None


def _is_in_memory(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        node = input_of(node)
    if not isinstance(node.target, OpOverload):
        return node.op == "placeholder"
    name = node.target.overloadpacket.__name__
    return node.target.namespace == "aten" and (name in EXTERN or name.startswith(ATTENTION))


def _viewed(graph: fx.Graph, stored: Stored, *, like: fx.Node) -> fx.Node:
    """The matrix again, without the casts."""
    node = stored.tensor
    for view in stored.views:
        assert callable(view.target), view.format_node()
        options: dict[str, Any] = dict(view.kwargs)
        node = emit(graph, view.target, node, *view.args[1:], like=like, **options)
    return node


def _operands(quantize: fx.Node) -> list[GemmOperand] | None:
    """The gemms that read a quantize; None if anything else does, or in a layout that the kernels do not write."""
    _, directions = GEMM_BLOCKS[tuple(arguments(quantize)[2])]
    found: dict[GemmOperand, None] = {}
    pending = [(user, (False, 1, 1)) for user in quantize.users if user.args[1] == Q]
    for node, copied in pending:
        for user in node.users:
            if (copy := relayout_arguments(user)) is not None:
                pending.append((user, copy))
            elif user.target is aten.permute.default:
                pending.append((user, copied))
            elif marked(user, Kind.GEMM) and user.target is aten._scaled_mm.default:
                transposed, row_multiple, multiple = copied
                if transposed not in directions or row_multiple != 1 or multiple not in MULTIPLES[transposed]:
                    return None
                sides = [side for side in (0, 1) if user.args[side] is node]
                found.update(dict.fromkeys(GemmOperand(user, side, transposed, multiple) for side in sides))
            else:
                return None
    return list(found)


def _is_summed(stored: Stored) -> bool:
    """True if a reduction reads the tensor, too."""
    pending = [stored.tensor]
    for node in pending:
        for user in node.users:
            if is_call_of(user, VIEWS_AND_CASTS):
                pending.append(user)
            elif user.target is aten.sum.dim_IntList:
                return True
    return False
