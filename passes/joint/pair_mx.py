"""Have MXFP8 operands quantized, and their scales ordered, the way gemms of a Blackwell GPU read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from fp8_compile.kernels.dequantize_operand import dequantize_mx_operand_op
from fp8_compile.kernels.gpu.cublaslt_mx_mm import cublaslt_mx_mm_op
from fp8_compile.kernels.mx_grouped_mm import mx_grouped_mm_op
from fp8_compile.kernels.mx_swizzled import (
    WIDE,
    directions,
    quantize_mx_swizzled_op,
    quantize_wide_swizzled,
    unswizzle,
)
from fp8_compile.kernels.mxfp8 import SIZE, dequantize_mx, mx_mm_op, quantize_mx_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import NEVER_SAVED, emit, getitem, inline, policy_of, value
from ..graph.marks import Kind, Mark, mark_of
from ..graph.roles import Role
from ..graph.views import untransposed
from ..graph_pass import GraphPass, PassReport
from .pair_grouped_mx import replace_grouped

aten = torch.ops.aten

Q, SCALE, SCALE_T = 0, 1, 2  # results of quantize_mx_swizzled


class PairMx(GraphPass):
    """Replace quantizes and gemms in MXFP8 by those that a GPU has.

    Before:  q, s = quantize_mx(x, [1, 32]);  q', s' = quantize_mx(x, [32, 1])
             y = mx_mm(q, permute(qw), s, permute(sw), None, bf16)
             dw = mx_mm(permute(qg), q', permute(sg), s', None, bf16)
    After:   q, s, _ = quantize_mx_swizzled(x, [1, 32]);  q', _, s' = quantize_mx_swizzled(x, [32, 1])
             y = cublaslt_mx_mm(q, permute(qw), s, sw, None, None, bf16)
             dw = cublaslt_mx_mm(permute(qg), q', sg, s', None, None, bf16)

    Each quantize is a store in the kernel that computes its tensor. Both of a tensor's are in one kernel, with one
    read, if they are in the same half of the graph: forward makes what a weight's gradient reads of an input, and saves
    that instead of the input itself, unless backward computes the input anyway, such as an activation from what its own
    gradient needs. What is not a multiple of 32 is filled up with zeros, on the way into that kernel.

    Blocks of 128 (blockwise) are quantized by plain operations, and their scales repeated for each 32 values along K.

    Where gemms want K contiguous, codes along columns are written transposed, and a weight's tiles once in each layout.
    Experts are in ``pair_grouped_mx.py``.
    """

    leaves_no = (quantize_mx_op, mx_mm_op, mx_grouped_mm_op, dequantize_mx_operand_op)

    def __init__(self, *, needs_k_contiguous: bool) -> None:
        self.needs_k_contiguous = needs_k_contiguous

    def run(self, graph: fx.Graph) -> PassReport:
        gemms = graph.find_nodes(op="call_function", target=mx_mm_op)
        quantizes = Quantizes(graph, self.needs_k_contiguous)
        for gemm in gemms:
            _replace(graph, gemm, quantizes)
        grouped = graph.find_nodes(op="call_function", target=mx_grouped_mm_op)
        for gemm in grouped:
            replace_grouped(graph, gemm, quantizes)
        for node in graph.find_nodes(op="call_function", target=dequantize_mx_operand_op):
            _dequantize(graph, node, quantizes)
        return PassReport(len(gemms) + len(grouped), "MXFP8 gemms whose operands are stored as the GPU reads them")


@dataclasses.dataclass(frozen=True)
class Operand:
    """One side of a gemm: the quantize, whether the gemm reads its matrix transposed, and whether K goes down it."""

    quantize: fx.Node
    flipped: bool
    k_down: bool  # K is the index of rows of the quantized matrix


class Quantizes:
    """The quantizes of a graph, each made once for all gemms that read it."""

    def __init__(self, graph: fx.Graph, needs_k_contiguous: bool) -> None:
        self.graph, self.needs_k_contiguous = graph, needs_k_contiguous
        self.made: dict[tuple[fx.Node, bool | str], tuple[fx.Node, ...]] = {}

    @staticmethod
    def side(node: fx.Node, *, is_left: bool) -> Operand:
        """A gemm's operand, by the node that it reads."""
        base, flipped = untransposed(node)
        quantize = input_of(base)
        assert quantize.target is quantize_mx_op, quantize.format_node()
        return Operand(quantize, flipped, k_down=flipped == is_left)

    def operand(self, operand: Operand, gemm: fx.Node, *, k_contiguous: bool | None = None) -> tuple[fx.Node, fx.Node]:
        """Codes and scales of one side."""
        if k_contiguous is None:
            k_contiguous = self.needs_k_contiguous
        results = self.results(operand.quantize, gemm, transposed=k_contiguous and operand.k_down)
        q = results[Q]
        if operand.flipped:
            q = emit(self.graph, aten.permute.default, q, [1, 0], like=gemm)
        return q, results[SCALE_T if operand.k_down else SCALE]

    def results(self, quantize: fx.Node, gemm: fx.Node, *, transposed: bool = False) -> tuple[fx.Node, ...]:
        """Codes and both kinds of scales of what a quantize reads."""
        key = quantize, transposed
        if key not in self.made:
            with self.graph.inserting_before(quantize):
                x, block = arguments(quantize)
                self.made[key] = self._make(quantize, x, block, transposed, gemm)
        return self.made[key]

    def stack_across(self, quantize: fx.Node, experts: int, gemm: fx.Node) -> tuple[fx.Node, ...]:
        """Codes and scales of a stack of matrices [E * R, C], each transposed and then quantized along its rows."""
        key = quantize, "across"
        if key not in self.made:
            with self.graph.inserting_before(quantize):
                x, block = arguments(quantize)
                x = inline(self.graph, _each_transposed, x, experts, like=quantize)
                self.made[key] = self._make(quantize, x, block[::-1], False, gemm)
        return self.made[key]

    def _make(
        self, node: fx.Node, x: fx.Node, block: Sequence[int], transposed: bool, gemm: fx.Node
    ) -> tuple[fx.Node, ...]:
        tags = policy_of_codes(node, gemm)
        if WIDE in block:
            x = filled(self.graph, x, like=node, multiples=tuple(max(SIZE, size) for size in block))
            wide = tuple(block), transposed
            return tuple(inline(self.graph, quantize_wide_swizzled, x, *wide, like=node, tags=tags))
        x = filled(self.graph, x, like=node)
        kept = Mark(use=mark_of(node).use)
        both = emit(self.graph, quantize_mx_swizzled_op, x, block, transposed, like=node, tags=tags, mark=kept)
        results = tuple(getitem(self.graph, both, index) for index in range(3))
        for result in results:
            result.meta.update(tags)
        return results


def _each_transposed(stack: torch.Tensor, experts: int) -> torch.Tensor:
    """[E * R, C] -> [E * C, R]."""
    rows, cols = stack.shape
    return stack.view(experts, rows // experts, cols).permute(0, 2, 1).reshape(experts * cols, -1)


def _dequantize(graph: fx.Graph, node: fx.Node, quantizes: Quantizes) -> None:
    """What codes stand for, for a backward gemm that is not MXFP8, from the scales as the forward gemm reads them."""
    q, _, block, dtype = arguments(node)
    results = next(made for (quantize, _), made in quantizes.made.items() if quantize is input_of(q))
    along_columns, _ = directions(block)
    operands = (results[Q], results[SCALE if along_columns else SCALE_T], along_columns, *value(node).shape, dtype)
    with graph.inserting_before(node):
        made = inline(graph, _dequantized, *operands, like=node, tags=NEVER_SAVED)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _dequantized(
    q: torch.Tensor, scale: torch.Tensor, along_columns: bool, rows: int, cols: int, dtype: torch.dtype
) -> torch.Tensor:
    outer, inner = q.shape if along_columns else q.shape[::-1]
    scales = unswizzle(scale, outer, (inner + SIZE - 1) // SIZE)
    block = (1, SIZE) if along_columns else (SIZE, 1)
    return dequantize_mx(q, scales if along_columns else scales.t(), block)[:rows, :cols].to(dtype)


def policy_of_codes(quantize: fx.Node, gemm: fx.Node) -> dict[str, CheckpointPolicy]:
    """Forward saves what a backward gemm reads of a tensor of forward, unless backward shall make it again."""
    use = mark_of(quantize).use
    if "recompute" in quantize.meta or use is None:  # a checkpointed layer, or cheap to make
        return {}
    if mark_of(gemm).gemm == "output" or use.role is Role.GRAD_OUTPUT:
        return {}
    return {"recompute": CheckpointPolicy.MUST_SAVE}


def _replace(graph: fx.Graph, gemm: fx.Node, quantizes: Quantizes) -> None:
    left, right, *_, bias, dtype = arguments(gemm)
    with graph.inserting_before(gemm):
        q_left, scale_left = quantizes.operand(quantizes.side(left, is_left=True), gemm)
        q_right, scale_right = quantizes.operand(quantizes.side(right, is_left=False), gemm)
        if bias is not None and not same(value(q_right).shape[1], value(bias).shape[0]):
            bias = inline(graph, fill_vector, bias, q_right, like=gemm)
        operands = (q_left, q_right, scale_left, scale_right, None, bias, dtype)
        mark = Mark(kind=Kind.GEMM)
        result = emit(graph, cublaslt_mx_mm_op, *operands, like=gemm, tags=policy_of(gemm), mark=mark)
        if not all(map(same, value(result).shape, value(gemm).shape)):
            result = inline(graph, _cut, result, left, right, like=gemm)
    gemm.replace_all_uses_with(result)
    graph.erase_node(gemm)


def is_full(size: int | torch.SymInt, multiple: int = SIZE) -> bool:
    return statically_known_true(size % multiple == 0)


def filled(graph: fx.Graph, x: fx.Node, *, like: fx.Node, multiples: tuple[int, ...] = (SIZE, SIZE)) -> fx.Node:
    """x with rows and columns of zeros, up to multiples of 32, or of what else is asked for."""
    if all(map(is_full, value(x).shape, multiples)):
        return x
    full: fx.Node = inline(graph, _fill, x, *multiples, like=like)
    return full


def _fill(x: torch.Tensor, of_rows: int, of_cols: int) -> torch.Tensor:
    rows, cols = x.shape
    return torch.nn.functional.pad(x, (0, -cols % of_cols, 0, -rows % of_rows))


def fill_vector(bias: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A bias with zeros, up to the columns of the right operand."""
    return torch.nn.functional.pad(bias, (0, right.shape[1] - bias.shape[0]))


def same(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """True if two sizes are known to be equal."""
    return statically_known_true(size == other)


def _cut(y: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return y[: left.shape[0], : right.shape[1]]
