"""Change the scaling state in place, once the graph is split."""

from __future__ import annotations

import torch
from torch import fx

from fp8_compile.kernels.delayed_scaling import (
    accumulate_in_place_op,
    accumulate_op,
    next_scales_op,
    record_in_place_op,
    record_op,
    update_in_place_op,
    update_op,
)
from fp8_compile.kernels.record_amax import record_amax_op
from fp8_compile.torch_internals import patches

from ..graph.arguments import arguments
from ..graph.emit import call_triton, emit, first_call, value
from ..graph.marks import Kind, source_of
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten


class UpdateInPlace(GraphPass):
    """Replace the functional update of the state, and the copies of its results, by calls that write to it.

    Before:  known = fp8_compile.next_scales(amaxes, history, scales, counts, room)
             amax = amax(abs(x))
             ...
             history', scales', counts', room' = fp8_compile.update_scales(amaxes, history, scales, counts, room)
             amaxes' = fp8_compile.record_amaxes(amaxes, [amax], [row])
             copy_(history, history');  copy_(scales, scales');  ...;  copy_(amaxes, amaxes')
    After:   known = empty_like(scales)
             update_scales_kernel(amaxes, history, scales, counts, room, known)   on a GPU: one Triton kernel
             fp8_compile.record_amax(amaxes, x, row)                              fused into the kernel that makes x
    CPU:     fp8_compile.update_scales_(amaxes, history, scales, counts, room, known)
             fp8_compile.record_amaxes_(amaxes, [amax], [row])

    Held:    amaxes' = fp8_compile.accumulate_amaxes(amaxes, [amax], [row]);  copy_(amaxes, amaxes')
    After:   fp8_compile.record_amax(amaxes, x, row)                              GPU
             fp8_compile.accumulate_amaxes_(amaxes, [amax], [row])                CPU
    """

    leaves_no = (next_scales_op, update_op, record_op, accumulate_op)

    def run(self, graph: fx.Graph) -> PassReport:
        begins = {node.args[0]: node for node in graph.find_nodes(op="call_function", target=next_scales_op)}
        ends = {node.args[0]: node for node in graph.find_nodes(op="call_function", target=record_op)}
        updates = {node.args[0]: node for node in graph.find_nodes(op="call_function", target=update_op)}
        for amaxes, record in ends.items():
            in_place = _OnGpu if value(amaxes).device.type != "cpu" else _OnCpu
            # Before all else: the partitioner may have moved what reads or records before the node that was first.
            with graph.inserting_before(first_call(graph)):
                known = in_place.update(graph, begins[amaxes])
            begins[amaxes].replace_all_uses_with(known)
            in_place.record(graph, record)
            for node in (record, *list(updates[amaxes].users)):
                for copy in [user for user in node.users if user.target is aten.copy_.default]:
                    graph.erase_node(copy)
            for node in (record, *list(updates[amaxes].users), updates[amaxes], begins[amaxes]):
                graph.erase_node(node)
        held = graph.find_nodes(op="call_function", target=accumulate_op)
        for record in held:
            in_place = _OnGpu if value(record.args[0]).device.type != "cpu" else _OnCpu
            in_place.record(graph, record)
            for copy in list(record.users):
                graph.erase_node(copy)
            graph.erase_node(record)
        return PassReport(len(ends) + len(held), "tables of the scaling state updated in place")


class _OnCpu:
    @staticmethod
    def update(graph: fx.Graph, node: fx.Node) -> fx.Node:
        known = emit(graph, aten.empty_like.default, node.args[2], like=node)
        emit(graph, update_in_place_op, *node.args[:5], known, *node.args[5:], like=node)
        return known

    @staticmethod
    def record(graph: fx.Graph, node: fx.Node) -> None:
        amaxes, recorded, rows, _ = arguments(node)
        op = record_in_place_op if node.target is record_op else accumulate_in_place_op
        with graph.inserting_before(node):
            emit(graph, op, amaxes, recorded, rows, like=node)


class _OnGpu:
    @staticmethod
    def update(graph: fx.Graph, node: fx.Node) -> fx.Node:
        from fp8_compile.kernels.gpu.update_scales import launch_arguments, update_scales_kernel

        amaxes, history, scales, counts, room, *rule = arguments(node)
        known = emit(graph, aten.empty_like.default, scales, like=node)
        state = dict(amaxes_ptr=amaxes, history_ptr=history, scales_ptr=scales, counts_ptr=counts, room_ptr=room)
        tensors = {**state, "known_ptr": known}
        grid, scalars = launch_arguments(*value(history).shape, *rule)
        call_triton(graph, update_scales_kernel, grid, tensors, scalars, like=node)
        return known

    @staticmethod
    def record(graph: fx.Graph, node: fx.Node) -> None:
        amaxes, recorded, rows, _ = arguments(node)
        in_kernels = patches.active("atomic_max")
        for amax, row in zip(recorded, rows):
            # Without atomic stores the amax is reduced as it stands in the graph, and only the result is recorded.
            with graph.inserting_before(amax if in_kernels else node):
                tensor = source_of(amax, Kind.SCALES) if in_kernels else amax
                emit(graph, record_amax_op, amaxes, tensor, row, like=amax)
