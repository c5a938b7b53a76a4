"""Quantize with scales from the passes before, and record what the passes to come will need."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

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
from fp8_compile.kernels.formats import format_of, format_with_max
from fp8_compile.kernels.quantize import block_amax, quantize_op
from fp8_compile.kernels.stochastic_cast import cast_stochastic

from ..graph.emit import emit, first_call, getitem, inline
from ..graph.roles import Role, is_backward
from ..graph.slot import BACKWARD, FIELDS, FORWARD, FROZEN, STATS, SlotPool, buffer_name, state_of
from ..graph_pass import GraphPass, PassReport
from ..split.relayout_bytes import saved_relayouts
from .lower_quantizes import CAST, SCALES

aten = torch.ops.aten

AMAX = 2  # value of meta["fp8_scale"] beside QUANT and DEQUANT


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """How a scale follows from a history; see ``kernels/delayed_scaling.py``."""

    margin: int = 0  # beyond what the format and role of a tensor have: MARGINS
    algorithm: str = "max"
    interval: int = 1

    @property
    def arguments(self) -> tuple[str, int]:
        """As the operations take them; the margin is part of the state, a number per slot."""
        return self.algorithm, self.interval

    def margin_of(self, role: Role, largest: float) -> int:
        """The margin of a tensor."""
        by_format = 0 if role is Role.WEIGHT else MARGINS[format_with_max(largest).significand_bits]
        return by_format + self.margin


# By significand bits, for what flows. Measured (benchmarks/margins.py): SQNR stays the same to 0.01 dB on normal,
# log-normal and row-scaled data, and the larger gradients of a short batch fit in. Weights change little in a step.
MARGINS = {3: 6, 4: 2}


class DelayScales(GraphPass):
    """Give each quantize the scale of its slot, and record its amax for the passes to come.

    Before:  q, s = fp8_compile.quantize(x, float8_e4m3fn, [-1, -1])
    After:   known = fp8_compile.next_scales(amaxes, history, scales, counts)
             quant_scale, s = known[0, row], known[1, row]
             q = convert_element_type(clamp(x * quant_scale, -448, 448) + x * 0, float8_e4m3fn)
             amax = amax(abs(x))
             ...
             history', scales', counts' = fp8_compile.update_scales(amaxes, history, scales, counts)
             amaxes' = fp8_compile.record_amaxes(amaxes, [amax, ...], [row, ...])
             copy_(history, history');  copy_(scales, scales');  copy_(counts, counts');  copy_(amaxes, amaxes')

    What forward quantizes is updated in forward, gradients in backward, all slots of a page at once. ``known`` is
    saved for backward. ``look_first``: a slot without history takes the scale of its own amax; that takes two reads
    of x, so GPU code has it only for the passes that fill the histories. Tensors that the pool has no place for keep
    their quantize, and with it their own scale: those of an inference graph, unless their scales are frozen. Inside a
    subgraph there is no place for state: nothing is done there.

    ``held``: the update is somebody else's, who first wants the amaxes of all ranks. Inductor drops the clone; then
    autograd sees to it that backward has the scales that its forward had.
    After:   known = clone(scales)
             amaxes' = fp8_compile.accumulate_amaxes(amaxes, [amax, ...], [row, ...]);  copy_(amaxes, amaxes')
    """

    def __init__(
        self, pool: SlotPool, rule: UpdateRule, *, look_first: bool, stats: bool = False, held: bool = False
    ) -> None:
        self.pool, self.rule, self.look_first, self.stats, self.held = pool, rule, look_first, stats, held

    def run(self, graph: fx.Graph) -> PassReport:
        nodes = graph.find_nodes(op="call_function", target=quantize_op)
        state = state_of(graph)
        if not state:
            return PassReport(0, "quantizes delayed")
        training = any(is_backward(node) for node in graph.nodes)
        pages: dict[tuple[str, int], PageInGraph] = {}
        for index, node in enumerate(nodes):
            place = self.pool.place(node.meta["fp8_use"])
            if place is None:
                continue
            key = self.pool.direction(node.meta["fp8_use"]), place.table
            if key not in pages:
                largest = format_of(node.args[1]).max  # type: ignore[arg-type]
                pages[key] = PageInGraph(graph, *key, state, self.rule, largest, held=self.held)
            self._replace(graph, node, index, pages[key], place.row)
        saved = saved_relayouts(graph)
        for (direction, _), page in pages.items():
            made, saved = (saved, []) if direction != BACKWARD else ([], saved)
            page.finish(stats=training and self.stats, made=made)
        return PassReport(sum(len(page.rows) for page in pages.values()), "quantizes delayed")

    def _replace(self, graph: fx.Graph, node: fx.Node, index: int, page: PageInGraph, row: int) -> None:
        """Put the formula in place of a quantize; all its nodes are marked with ``index``."""
        x, dtype, block = node.args
        marks = {"fp8_delayed": index, "fp8_arguments": (dtype, tuple(block))}  # type: ignore[arg-type]
        scale_marks = {"fp8_kind": SCALES, **marks}
        backward = page.tags if page.tags == _tag(BACKWARD) else {}
        with graph.inserting_before(node):
            quant_scale, dequant_scale = inline(graph, of_row, page.known, row, like=node, tags=backward)
            amax = inline(graph, block_amax, x, block, like=node, tags=scale_marks)
            if self.look_first:
                arguments = (quant_scale, amax, page.largest)
                quant_scale, dequant_scale = inline(graph, _look_first, *arguments, like=node, tags=scale_marks)
                for index, scale in ((QUANT, quant_scale), (DEQUANT, dequant_scale)):
                    scale.meta.update(fp8_scale=index, recompute=CheckpointPolicy.MUST_SAVE)
            if node.meta["fp8_stochastic"]:
                q = inline(graph, cast_stochastic, x, quant_scale, dtype, like=node)
            else:
                q = inline(graph, cast_delayed, x, quant_scale, dtype, like=node, tags={"fp8_kind": CAST, **marks})
            if node.meta.get("fp8_saved"):
                q.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            counted = None
            if self.stats:
                counted = inline(graph, count, x, q, quant_scale, dequant_scale, page.largest, like=node)
        amax.meta["fp8_scale"] = AMAX
        page.record(row, amax, counted)
        results = (q, dequant_scale)
        for user in list(node.users):
            assert user.target is operator.getitem, user.format_node()
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
        graph.erase_node(node)


class PageInGraph:
    """One page of the state in one graph: updated at the start, amaxes recorded at the end."""

    def __init__(
        self,
        graph: fx.Graph,
        direction: str,
        page: int,
        state: dict[str, fx.Node],
        rule: UpdateRule,
        largest: float,
        *,
        held: bool = False,
    ) -> None:
        self.graph, self.largest, self.held = graph, largest, held
        self.fields = {field: state[buffer_name(direction, page, field)] for field in FIELDS}
        self.stats = state.get(buffer_name(direction, page, STATS))
        self.rule = (largest, *(("frozen", 1) if direction == FROZEN else rule.arguments))
        self.like, self.tags = self.fields["scales"], _tag(direction)
        self.rows: list[int] = []
        self.amaxes: list[fx.Node] = []
        self.counted: list[fx.Node] = []
        with graph.inserting_before(first_call(graph)):
            if held:
                self.known = self._emit(aten.clone.default, self.fields["scales"])
            else:
                self.known = self._emit(next_scales_op, *self.fields.values(), *self.rule)
        self.known.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    def record(self, row: int, amax: fx.Node, counted: fx.Node | None) -> None:
        for node in (*_own_chain(amax), *([counted] if counted else [])):
            node.meta.pop("recompute", None)  # a checkpoint's recomputation records nothing
        self.rows.append(row)
        self.amaxes.append(amax)
        if counted:
            self.counted.append(counted)

    def finish(self, *, stats: bool, made: list[fx.Node]) -> None:
        """Write the state back, before the graph returns.

        ``made``: what forward is to make for backward. The partitioner saves only what forward makes for itself, or
        for a write to memory: hence for this one.
        """
        fields = self.fields
        with self.graph.inserting_before(self.graph.output_node()):
            arguments = (fields["amaxes"], self.amaxes, self.rows, [self.known, *made])
            if self.held:
                results = {"amaxes": self._emit(accumulate_op, *arguments)}
            else:
                new = self._emit(update_op, *fields.values(), *self.rule)
                results = {field: self._part(new, index) for index, field in enumerate(("history", "scales", "counts"))}
                results["amaxes"] = self._emit(record_op, *arguments)
            for field, result in results.items():
                self._emit(aten.copy_.default, fields[field], result)
            if stats:
                counted = self._emit(add_counts_op, self.stats, self.counted, self.rows)
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
        found += [arg for arg in node.all_input_nodes if arg.meta.get("fp8_kind") == SCALES and arg not in found]
    return found


def of_row(known: torch.Tensor, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """quant_scale and dequant_scale of a slot, [1, 1] each."""
    return known[QUANT, row].view(1, 1), known[DEQUANT, row].view(1, 1)


def _look_first(
    quant_scale: torch.Tensor, amax: torch.Tensor, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    quant_scale = first_scale(quant_scale, amax, largest)
    return quant_scale, quant_scale.reciprocal()
