"""Replace eligible matmuls with FP8 ones."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8_compile.kernels.dequantize_operand import dequantize_fp8_operand_op
from fp8_compile.kernels.quantize import HIGH_PRECISION, WHOLE, quantize_op

from ..graph.emit import emit, getitem, inline, policy_of, value
from ..graph.fp8_gemm import Fp8Gemm
from ..graph.marks import Mark, set_mark
from ..graph.matmul import GroupedMatmul, Matmul, OtherMatmul
from ..graph.padded_groups import PaddedGroups
from ..graph.producers import made_pointwise
from ..graph.relayouts import emit_relayout
from ..graph.roles import Names, Role
from ..graph.row import REWRITTEN, SKIPPED, Row, code_line
from ..graph.rules import Rules
from ..graph.slot import state_of, tensor_use
from ..graph.views import untransposed
from ..graph_pass import GraphPass, PassReport
from .decide import Dequantize, OperandPlan, Rewrite, Skip, decide
from .dequantize_forward import ForwardOperands, QuantizedOperand
from .find_matmuls import find_matmuls, operands_of
from .rewrite_block_scaled import PRODUCTS, Site
from .rewrite_grouped import GroupedEditor

aten, prims = torch.ops.aten, torch.ops.prims

LINE = 16  # bytes that a row must be a multiple of for cuBLASLt to read it across


class RewriteMatmuls(GraphPass):
    """Replace eligible ``aten.mm``, ``addmm``, ``bmm`` and ``baddbmm`` with FP8 ``aten._scaled_mm``.

    Before:  y: bf16[M, N] = mm(x, permute(w))
    After:   qx, sx = quantize(x);  qw, sw = quantize(w)
             y: bf16[M, N] = _scaled_mm(qx, permute(qw), sx, sw, out_dtype=bf16)

    A transposed operand is quantized as it is stored, so that forward and backward quantize a tensor in the same way
    (``ShareQuantizes`` makes that one quantize). Where the target wants the contraction contiguous, the FP8 bytes are
    transposed, not the original. Where it reads any layout, nothing is transposed:
             dx: bf16[M, K] = cublaslt_mm(qdy, qw, sdy, sw, None, None, out_dtype=bf16)
    With ``backward="dequantized"``, backward matmuls stay and read the operands of forward: ``dequantize_forward.py``.
    A stack of products becomes one gemm per slice; ragged groups stay one operation, see ``rewrite_grouped.py``.

    Skips: see ``decide.py``. Every matmul gets a :class:`Row`.
    """

    def __init__(self, rules: Rules, names: Names, *, strict: bool = True) -> None:
        self.rules, self.names, self.strict = rules, names, strict
        self.rows: list[Row] = []

    def run(self, graph: fx.Graph) -> PassReport:
        sites = find_matmuls(graph, self.names)
        rules = self.rules
        if rules.recipe == "delayed" and not state_of(graph):
            rules = dataclasses.replace(rules, recipe="tensorwise")  # neither a subgraph nor inference has state
        decisions = [Skip(site.reason) if isinstance(site, OtherMatmul) else decide(site, rules) for site in sites]
        self.rows += [_row(site, decision) for site, decision in zip(sites, decisions)]  # a graph may have subgraphs
        if self.strict:
            _check_dtypes(sites)
        operands, groups = ForwardOperands(), PaddedGroups(graph)
        rewritten = 0
        for site, decision in zip(sites, decisions):
            set_mark(site.node, site=site.node.name, module=site.module, gemm=site.gemm)
            if isinstance(decision, Dequantize) and isinstance(site, Matmul):
                operands.read_by(graph, site)
            if isinstance(decision, Skip) or isinstance(site, OtherMatmul):
                continue
            if isinstance(site, GroupedMatmul):
                GroupedEditor(graph, site, decision, rules, operands, groups).replace()
            else:
                _Editor(graph, site, decision, rules, operands).replace()
            rewritten += 1
        return PassReport(rewritten, f"of {len(sites)} matmuls rewritten")


class _Editor:
    """The edit of one matmul."""

    def __init__(
        self, graph: fx.Graph, site: Matmul, plan: Rewrite, rules: Rules, operands: ForwardOperands
    ) -> None:
        self.graph, self.site, self.plan, self.rules, self.operands = graph, site, plan, rules, operands
        self.wanted: torch.dtype = value(site.node).dtype
        self.written: torch.dtype = rules.only_output or self.wanted
        self.left, self.right, self.added = operands_of(site.node)
        self.bias = self.added if self._gemm_can_add() else None

    def replace(self) -> None:
        site = self.site
        with self.graph.inserting_before(site.node):
            if site.batched:
                slices = [self._product(*self._slice(index), index) for index in range(int(site.shape[0]))]
                result = self._inline(_stack, *slices)
            else:
                result = self._product(self.left, self.right)
            result = self._add(result)
        site.node.replace_all_uses_with(result)
        self.graph.erase_node(site.node)

    def _slice(self, index: int) -> tuple[fx.Node, fx.Node]:
        return self._emit(aten.select.int, self.left, 0, index), self._emit(aten.select.int, self.right, 0, index)

    def _product(self, left: fx.Node, right: fx.Node, part: int | None = None) -> fx.Node:
        """``[M, K] @ [K, N]`` in the dtype of the original; ``part``: which product of a stack."""
        if (recipe := self.rules.block_scaled) is not None:
            place = Site(self.graph, self.site, self.plan, self.rules, part, self.operands)
            return PRODUCTS[recipe](place, left, right, self.bias, self.wanted)
        q_left, scale_left = self._operand(left, self.plan.left, part, is_left=True)
        q_right, scale_right = self._operand(right, self.plan.right, part, is_left=False)
        # FP22 accumulation is enough for activations; gradients are summed exactly, as the peers do.
        fast = self.site.gemm == "output" and self.rules.needs_k_contiguous
        gemm = Fp8Gemm(q_left, q_right, scale_left, scale_right, self.bias, self.written, fast)
        as_stored = self._reads_across(left, is_left=True) or self._reads_across(right, is_left=False)
        node, tags = self.site.node, policy_of(self.site.node)
        result = gemm.emit(self.graph, like=node, by_cublaslt=as_stored, tags=tags)
        if self.plan.align_n > 1:
            result = self._inline(_first_columns, result, right)
        if self.written != self.wanted:
            result = self._emit(prims.convert_element_type.default, result, self.wanted)
        return result

    def _operand(
        self, node: fx.Node, plan: OperandPlan, part: int | None, *, is_left: bool
    ) -> tuple[fx.Node, fx.Node]:
        """FP8 values and scales of one side: left as [M, K] and [M/r, K/c], right as [K, N] and [K/c, N/r]."""
        base, flipped = untransposed(node)
        rows_first = flipped != is_left  # the base is stored as [rows, contraction]: x of x @ w, w of x @ w.T
        block = plan.block if rows_first else plan.block[::-1]
        role = (self.site.left if is_left else self.site.right).role
        across, from_forward = self._reads_across(node, is_left=is_left), self._is_from_forward(base, role)
        mark = Mark(
            use=tensor_use(self.site, role, part),
            stochastic=role in self.rules.stochastic,
            reads_forwards=across and from_forward,
        )
        both = self._emit(quantize_op, base, plan.format.dtype, list(block), mark=mark)
        q, scale = getitem(self.graph, both, 0), getitem(self.graph, both, 1)
        known = QuantizedOperand(dequantize_fp8_operand_op, (q, scale, list(block)), flipped)
        self.operands.note(self.site, is_left, part, known)
        if across:
            pass  # one scale, and q as it is stored
        elif self.rules.needs_k_contiguous:
            multiples = self._multiples(is_left)
            scale = self._scale_in_layout(scale, plan, rows_first, is_left, multiples[0])
            if not rows_first or multiples != (1, 1):
                # With delayed scaling forward can write the copy beside q with one read of the tensor.
                saved = from_forward and self.rules.recipe == "delayed"
                q = emit_relayout(self.graph, q, not rows_first, *multiples, like=self.site.node, saved=saved)
                rows_first = True
        elif rows_first != is_left:
            scale = self._emit(aten.permute.default, scale, [1, 0])
        if rows_first != is_left:
            q = self._emit(aten.permute.default, q, [1, 0])
        return q, scale

    def _multiples(self, is_left: bool) -> tuple[int, int]:
        """What an operand's rows (M or N) and its contraction are filled up to."""
        return 1 if is_left else self.plan.align_n, self.plan.align_k

    def _reads_across(self, node: fx.Node, *, is_left: bool) -> bool:
        """True if the gemm reads an operand as it is stored though its contraction is not contiguous."""
        base, flipped = untransposed(node)
        if not self.rules.reads_any_layout or flipped != is_left:
            return False
        plan = self.plan.left if is_left else self.plan.right
        whole = plan.block == (WHOLE, WHOLE) and self._multiples(is_left) == (1, 1)
        return whole and statically_known_true(value(base).shape[1] % LINE == 0)

    def _is_from_forward(self, base: fx.Node, role: Role) -> bool:
        """True if forward makes and saves what a backward gemm reads.

        Otherwise backward would read the tensor or q once more. Not where it has to compute the tensor anyway, such as
        the activation before a matmul, whose inputs are saved for its own gradient. A checkpointed layer saves nothing.
        """
        forward = self.site.forward
        if forward is None or role is Role.GRAD_OUTPUT:
            return False
        return "recompute" not in forward.node.meta and (role is Role.WEIGHT or not made_pointwise(base))

    def _scale_in_layout(
        self, scale: fx.Node, plan: OperandPlan, rows_first: bool, is_left: bool, row_multiple: int
    ) -> fx.Node:
        if plan.block == (WHOLE, WHOLE):
            return scale
        if plan.block[0] != 1:
            return self._inline(_tile_scales, scale, rows_first, is_left)
        blocks = value(scale).shape[1 if rows_first else 0]
        if statically_known_true(blocks == 1):
            return self._inline(_row_scales, scale, is_left, row_multiple)
        return self._inline(_row_block_scales, scale, rows_first, is_left, row_multiple)

    def _gemm_can_add(self) -> bool:
        """True if the gemm itself can add the bias: a vector, unscaled, in a 16-bit output (any on the CPU)."""
        site, added = self.site, self.added
        return (
            added is not None
            and value(added).dim() == 1
            and value(added).dtype == self.written == self.wanted
            and site.alpha == site.beta == 1
            and self.plan.align_n == 1
            and (self.written in (torch.bfloat16, torch.float16) or not self.rules.needs_k_contiguous)
        )

    def _add(self, result: fx.Node) -> fx.Node:
        site = self.site
        if site.alpha != 1:
            result = self._emit(aten.mul.Tensor, result, site.alpha)
        if self.added is None or site.beta == 0 or self.bias is not None:
            return result
        added = self.added if site.beta == 1 else self._emit(aten.mul.Tensor, self.added, site.beta)
        return self._emit(aten.add.Tensor, result, added)

    def _emit(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return emit(self.graph, op, *args, like=self.site.node, **kwargs)

    def _inline(self, function: Callable[..., torch.Tensor], *args: Any) -> fx.Node:
        return inline(self.graph, function, *args, like=self.site.node)


def _check_dtypes(sites: list[Matmul | OtherMatmul]) -> None:
    """A model in a dtype that has no way to FP8 is a mistake to report, not a list of skipped layers."""
    layers = [site for site in sites if isinstance(site, Matmul) and site.weights]
    if layers and not any(site.dtype in HIGH_PRECISION for site in layers):
        first = layers[0]
        raise TypeError(
            f"no layer can run in FP8: {first.module or first.weights[0]} and all others multiply in {first.dtype}; "
            "expected float32, bfloat16 or float16. Convert the model first, e.g. model.float()"
        )


def _first_columns(y: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return y[:, : right.shape[1]]


def _stack(*slices: torch.Tensor) -> torch.Tensor:
    return torch.stack(slices)


def _row_scales(scale: torch.Tensor, is_left: bool, row_multiple: int) -> torch.Tensor:
    """One scale per row: [M, 1] or [1, N], with every stride 1."""
    flat = scale.reshape(-1)
    flat = torch.nn.functional.pad(flat, (0, -flat.shape[0] % row_multiple)) if row_multiple > 1 else flat
    return flat[:, None] if is_left else flat[None, :]


def _row_block_scales(scale: torch.Tensor, rows_first: bool, is_left: bool, row_multiple: int) -> torch.Tensor:
    """cuBLAS reads the scales of 1x128 blocks with the row (M or N) as the fastest dimension."""
    by_block = scale.t() if rows_first else scale
    if row_multiple > 1:
        by_block = torch.nn.functional.pad(by_block, (0, -by_block.shape[1] % row_multiple))
    return by_block.contiguous().t() if is_left else by_block.contiguous()


def _tile_scales(scale: torch.Tensor, rows_first: bool, is_left: bool) -> torch.Tensor:
    """cuBLAS reads the scales of 128x128 tiles with K fastest, its extent rounded up to a multiple of 4."""
    by_row = scale if rows_first else scale.t()
    tiles = by_row.shape[1]
    padded = torch.nn.functional.pad(by_row, (0, -tiles % 4)).contiguous()[:, :tiles]
    return padded if is_left else padded.t()


def _row(site: Matmul | OtherMatmul, decision: Rewrite | Skip) -> Row:
    shape = tuple(size if isinstance(size, int) else str(size) for size in site.shape)
    assert isinstance(decision, Skip) or isinstance(site, Matmul), "what is not a Matmul is left alone"
    return Row(
        site.module,
        site.gemm,
        shape,
        SKIPPED if isinstance(decision, Skip) else REWRITTEN,
        decision.reason,
        site.op,
        weight=site.weights[0] if isinstance(site, Matmul) and site.weights else "",
        formats=() if isinstance(decision, Skip) else (str(decision.left.format), str(decision.right.format)),
        node=site.node.name,
        code=code_line(site.node),
    )
