"""Quantize with scales from earlier steps, and record what later steps will need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fp8_compile.kernels.cpu.quantize import quantize_delayed_op, whole_scale_op
from fp8_compile.kernels.delayed_scaling import (
    DEQUANT,
    QUANT,
    accumulate_op,
    add_counts_op,
    cast_delayed,
    count,
    first_scale,
    next_scales_op,
    record_op,
    update_op,
)
from fp8_compile.kernels.formats import E2M1, E4M3, format_of
from fp8_compile.kernels.mxfp8 import quantize_mx_op
from fp8_compile.kernels.nvfp4_training import global_scale_op
from fp8_compile.kernels.quantize import WHOLE, block_amax, quantize_op
from fp8_compile.kernels.stochastic_cast import cast_stochastic

from ..graph.arguments import arguments, input_of
from ..graph.call_cast import call_cast
from ..graph.emit import emit, first_call, getitem, inline, replace_results
from ..graph.marks import AMAX, Kind, Mark, mark_of, marked, set_mark
from ..graph.relayouts import saved_relayouts
from ..graph.roles import is_backward
from ..graph.slot import BACKWARD, FIELDS, FORWARD, FROZEN, STATS, SlotPool, state_input, state_of
from ..graph.traced import passes_on
from ..graph.update_rule import UpdateRule
from ..graph_pass import GraphPass, PassReport
from .count_blocks import count_block_quantize, counted_nodes

aten = torch.ops.aten


class DelayScales(GraphPass):
    """Give each quantize the scale of its slot, and record its amax for later steps.

    Before:  q, s = fp8_compile.quantize(x, float8_e4m3fn, [-1, -1])
    After:   known = fp8_compile.next_scales(amaxes, history, scales, counts, room)
             quant_scale, s = known[0, row], known[1, row]
             q = convert_element_type(clamp(x * quant_scale, -448, 448) + x * 0, float8_e4m3fn)
             amax = amax(abs(x))
             ...
             history', scales', counts', room' = fp8_compile.update_scales(amaxes, history, scales, counts, room)
             amaxes' = fp8_compile.record_amaxes(amaxes, [amax, ...], [row, ...])
             copy_(history, history');  copy_(scales, scales');  ...;  copy_(amaxes, amaxes')

    The slots of what forward quantizes are updated in forward, those of gradients in backward, all slots of a table at
    once. ``known`` is saved for backward. ``look_first``: a slot without history takes the scale of its own amax. That
    takes two reads of x, so GPU code does it only in the steps that fill the histories. Tensors that the pool has no
    place for keep their quantize, and with it their own scale: those of an inference graph, unless their scales are
    frozen. A subgraph has no place for state and is left as it is.

    ``calls``: on a CPU, where the partitioner can be told that our own cast is cheap (``cheap_ops.py``),
    two calls of C++ do for amax, scales and cast.
    After:   _, used, s, amax = fp8_compile.quantize_delayed(x, known[0, row], float8_e4m3fn, wanted=False)
             q = fp8_compile.cast(x, used)
    NVFP4:   enc, dequant, amax = fp8_compile.whole_scale(x, known[0, row], 6.0)

    ``held``: the update is made elsewhere, once the amaxes of all ranks are known. Inductor removes the clone; autograd
    then makes sure that backward has the scales that its forward had.
    After:   known = clone(scales)
             amaxes' = fp8_compile.accumulate_amaxes(amaxes, [amax, ...], [row, ...]);  copy_(amaxes, amaxes')

    ``exact``: every tensor has its own scale, and slots are for ``stats`` alone.
    """

    def __init__(
        self,
        pool: SlotPool,
        rule: UpdateRule,
        *,
        look_first: bool,
        stats: bool = False,
        held: bool = False,
        exact: bool = False,
        calls: bool = False,
    ) -> None:
        self.pool, self.rule, self.look_first, self.stats, self.held = pool, rule, look_first, stats, held
        self.exact = exact
        self.calls = calls and look_first

    def run(self, graph: fx.Graph) -> PassReport:
        nodes = [] if self.exact else delayed_nodes(graph)
        state = state_of(graph)
        if not state:
            return PassReport(0, "quantizes delayed")
        training = any(is_backward(node) for node in graph.nodes)
        tables = TablesInGraph(graph, self.pool, self.rule, state, held=self.held)
        for index, node in enumerate(nodes):
            if (place := tables.place(node)) is not None:
                self._replace(graph, node, index, *place)
        for node in counted_nodes(graph) if training and self.stats else ():
            if (place := tables.place(node)) is not None:
                self._count(graph, node, *place)
        saved = saved_relayouts(graph)
        for (direction, _), table in tables.tables.items():
            made, saved = (saved, []) if direction != BACKWARD else ([], saved)
            table.finish(stats=training and self.stats, made=made)
        return PassReport(sum(len(table.rows) for table in tables.tables.values()), "quantizes delayed")

    @staticmethod
    def _count(graph: fx.Graph, node: fx.Node, table: TableInGraph, row: int) -> None:
        """Count what becomes of blocks, which have scales of their own. Where the state has no scale of the whole
        tensor (MXFP8, exact global scales), its amax is recorded to be looked at."""
        counted = count_block_quantize(graph, node)
        if row in table.rows:
            table.counted[row] = counted
            return
        with graph.inserting_before(node.next):
            amax = inline(graph, block_amax, input_of(node), [WHOLE, WHOLE], like=node)
        table.record(row, amax, counted)

    def _replace(self, graph: fx.Graph, node: fx.Node, index: int, table: TableInGraph, row: int) -> None:
        """Put the formula in the place of a quantize; all its nodes are marked with ``index``."""
        x, dtype, block = _tensor(node)
        casts = node.target is quantize_op  # else only the scale is asked for
        scales = Mark(kind=Kind.SCALES, quantize=(dtype, (block[0], block[1])), delayed=index if casts else None)
        cast = dataclasses.replace(scales, kind=Kind.CAST)
        backward = table.tags if table.tags == _tag(BACKWARD) else {}
        with graph.inserting_before(node):
            if self.calls:
                to = dtype if casts else None
                quant_scale, dequant_scale, amax = _called(graph, x, table, row, to, like=node, tags=backward)
            else:
                quant_scale, dequant_scale = inline(graph, of_row, table.known, row, like=node, tags=backward)
                amax = inline(graph, block_amax, x, block, like=node, mark=scales)
            if self.look_first and not self.calls:
                known = (quant_scale, amax, table.largest)
                quant_scale, dequant_scale = inline(graph, _look_first, *known, like=node, mark=scales)
                for which, scale in ((QUANT, quant_scale), (DEQUANT, dequant_scale)):
                    if casts:
                        set_mark(scale, scale=which)
                    scale.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if not casts:
                q = quant_scale
            elif mark_of(node).stochastic:
                q = inline(graph, cast_stochastic, x, quant_scale, dtype, like=node)
            elif self.calls:
                q = call_cast(graph, x, quant_scale, dtype, block, like=node)
            else:
                q = inline(graph, cast_delayed, x, quant_scale, dtype, like=node, mark=cast)
            if mark_of(node).saved:
                q.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            counted = None
            if self.stats and casts:
                counted = inline(graph, count, x, q, quant_scale, dequant_scale, table.largest, like=node)
        if casts and not self.calls:
            set_mark(amax, scale=AMAX)
        table.record(row, amax, counted)
        replace_results(graph, node, (q, dequant_scale))


def _called(
    graph: fx.Graph,
    x: fx.Node,
    table: TableInGraph,
    row: int,
    dtype: torch.dtype | None,
    *,
    like: fx.Node,
    tags: Mapping[str, Any],
) -> tuple[fx.Node, fx.Node, fx.Node]:
    """quant_scale, dequant_scale and amax by a call of ``kernels/cpu``; ``dtype``: what x is cast to afterwards, None
    where only the scale is asked for."""
    known = emit(graph, aten.select.int, table.quant_scales(like, tags), 0, row, like=like, tags=tags)
    if dtype is None:
        call, first = emit(graph, whole_scale_op, x, known, table.largest, like=like), 0
    else:
        call, first = emit(graph, quantize_delayed_op, x, known, dtype, False, like=like), 1
    call.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    quant_scale, dequant_scale, amax = (getitem(graph, call, first + which) for which in range(3))
    return quant_scale, dequant_scale, amax


def delayed_nodes(graph: fx.Graph) -> list[fx.Node]:
    """What takes its scale from the state: FP8 quantizes, and the scales of whole tensors in NVFP4. Inputs of packed
    layers are not tensors of the recipe's."""
    quantizes = (node for node in graph.nodes if node.target in (quantize_op, global_scale_op))
    return [node for node in quantizes if mark_of(node).use is not None]


def largest_of(node: fx.Node) -> float:
    """The value that the largest magnitude of a tensor becomes."""
    if node.target is quantize_mx_op:
        return E4M3.max
    return format_of(arguments(node)[1]).max if node.target is quantize_op else E2M1.max


def _tensor(node: fx.Node) -> tuple[fx.Node, torch.dtype, list[int]]:
    """What a node scales: the tensor, its format, and the blocks that share a scale."""
    if node.target is global_scale_op:
        return input_of(node), E2M1.dtype, [WHOLE, WHOLE]
    x, dtype, block = arguments(node)
    return x, dtype, block


class TablesInGraph:
    """The tables of the state that a graph has tensors in, by direction and number."""

    def __init__(
        self, graph: fx.Graph, pool: SlotPool, rule: UpdateRule, state: dict[str, fx.Node], *, held: bool
    ) -> None:
        self.graph, self.pool, self.rule, self.state, self.held = graph, pool, rule, state, held
        self.tables: dict[tuple[str, int], TableInGraph] = {}

    def place(self, quantize: fx.Node) -> tuple[TableInGraph, int] | None:
        """Table and row of what a node quantizes; None if the tensor takes its own scale."""
        use = mark_of(quantize).use
        assert use is not None, quantize.format_node()
        place = self.pool.place(use)
        if place is None:
            return None
        key = self.pool.direction(use), place.table
        if key not in self.tables:
            largest = largest_of(quantize)
            self.tables[key] = TableInGraph(self.graph, *key, self.state, self.rule, largest, held=self.held)
        return self.tables[key], place.row


class TableInGraph:
    """One table of the state in one graph, which is updated at the start and gets new amaxes at the end."""

    def __init__(
        self,
        graph: fx.Graph,
        direction: str,
        table: int,
        state: dict[str, fx.Node],
        rule: UpdateRule,
        largest: float,
        *,
        held: bool = False,
    ) -> None:
        self.graph, self.largest, self.held = graph, largest, held
        self.fields = {field: state[state_input(direction, table, field)] for field in FIELDS}
        self.stats = state.get(state_input(direction, table, STATS))
        self.rule = (largest, *(("frozen", 1) if direction == FROZEN else rule.arguments))
        self.like, self.tags = self.fields["scales"], _tag(direction)
        self.rows: list[int] = []
        self.amaxes: list[fx.Node] = []
        self.counted: dict[int, fx.Node] = {}  # by row
        with graph.inserting_before(first_call(graph)):
            if held:
                self.known = self._emit(aten.clone.default, self.fields["scales"])
            else:
                self.known = self._emit(next_scales_op, *self.fields.values(), *self.rule)
        self.known.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        self._quant_scales: fx.Node | None = None

    def quant_scales(self, like: fx.Node, tags: Mapping[str, Any]) -> fx.Node:
        """Those that are known, [rows, 1, 1]: one selects a row for each quantize."""
        if self._quant_scales is None:
            with self.graph.inserting_before(self.known.next):
                each: fx.Node = inline(self.graph, _of_each_row, self.known, like=like, tags=tags)
            each.meta.pop("recompute", None)
            self._quant_scales = each
        return self._quant_scales

    def record(self, row: int, amax: fx.Node, counted: fx.Node | None) -> None:
        for node in (*_own_chain(amax), *([counted] if counted else [])):
            node.meta.pop("recompute", None)  # a checkpoint's recomputation records nothing
        self.rows.append(row)
        self.amaxes.append(amax)
        if counted:
            self.counted[row] = counted

    def finish(self, *, stats: bool, made: list[fx.Node]) -> None:
        """Write the state back, before the graph returns.

        ``made``: what forward is to make for backward. The partitioner saves only what forward makes for itself, or
        for a write to memory, so the write of the state reads it.
        """
        fields = self.fields
        with self.graph.inserting_before(self.graph.output_node()):
            recorded = (fields["amaxes"], self.amaxes, self.rows, [self.known, *made])
            if self.held:
                results = {"amaxes": self._emit(accumulate_op, *recorded)}
            else:
                new = self._emit(update_op, *fields.values(), *self.rule)
                results = {field: self._part(new, index) for index, field in enumerate(FIELDS[1:])}
                results["amaxes"] = self._emit(record_op, *recorded)
            for field, result in results.items():
                self._emit(aten.copy_.default, fields[field], result)
            if stats:
                counted = self._emit(add_counts_op, self.stats, list(self.counted.values()), list(self.counted))
                self._emit(aten.copy_.default, self.stats, counted)

    def _emit(self, op: Any, *args: Any) -> fx.Node:
        return emit(self.graph, op, *args, like=self.like, tags=self.tags)

    def _part(self, node: fx.Node, index: int) -> fx.Node:
        part = getitem(self.graph, node, index)
        part.meta.update(self.tags)
        return part


def _tag(direction: str) -> dict[str, Any]:
    return {"partitioner_tag": f"must_be_in_{BACKWARD if direction == BACKWARD else FORWARD}"}


def _own_chain(amax: fx.Node) -> list[fx.Node]:
    """The nodes that compute an amax from its tensor."""
    found = [amax]
    for node in found:
        found += [arg for arg in node.all_input_nodes if marked(arg, Kind.SCALES) and arg not in found]
    return found


@passes_on("row")
def of_row(known: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """quant_scale and dequant_scale of a slot, [1, 1] each."""
    return known[QUANT, row].view(1, 1), known[DEQUANT, row].view(1, 1)


def _of_each_row(known: torch.Tensor) -> torch.Tensor:
    return known[QUANT][:, None, None]


def _look_first(
    quant_scale: torch.Tensor, amax: torch.Tensor, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    quant_scale = first_scale(quant_scale, amax, largest)
    return quant_scale, quant_scale.reciprocal()
