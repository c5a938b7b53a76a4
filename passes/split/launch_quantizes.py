"""Launch the Triton kernels that quantize what is in memory, once the graph is split."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fp8_compile.kernels.formats import format_of
from fp8_compile.kernels.quantize import WHOLE
from fp8_compile.kernels.quantize_both import DEQUANT, DEQUANT_T, Q_T, Q, empty_results, quantize_both_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import call_triton, emit, first_call, getitem, inline, replace_results, value
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten

SIZES = ("rows", "cols", "row_stride", "col_stride", "padded")


class LaunchQuantizes(GraphPass):
    """Replace the quantizes of ``PairQuantizes`` by launches that make what this half of the graph reads of them.

    Before:  q, s, q_t, s_t = fp8_compile.quantize_both(x, e4m3, [1, 128], 1, None)
    After:   q, s, q_t, s_t = empty(...), empty(...), empty(...), empty(...)
             quantize_blocks_kernel(x, q, q_t, s, s_t)

    [1, -1]: bits, ... = _foreach_mul([empty(rows + columns), ...], 0)
             row_column_amax_kernel(x, bits);  cast_rows_columns_kernel(x, bits, q, q_t, s, s_t)
             quantize_rows_kernel(x, q, s)                                                where q alone is read

    On a CPU the op stays: its plain PyTorch is what the kernels' results are compared with.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        nodes = graph.find_nodes(op="call_function", target=quantize_both_op)
        nodes = [node for node in nodes if value(input_of(node)).device.type != "cpu"]
        amaxes = _amaxes(graph, nodes)
        for node in nodes:
            with graph.inserting_before(node):
                x, dtype, block, multiple, _ = arguments(node)
                results = inline(graph, empty_results, x, dtype, tuple(block), multiple, like=node)
                along_rows, along_columns = bool(_read(node) & {Q, DEQUANT}), bool(_read(node) & {Q_T, DEQUANT_T})
                if block[1] != WHOLE:
                    _launch_blocks(graph, node, results, along_rows, along_columns)
                elif along_columns:
                    _launch_rows_columns(graph, node, results, along_rows, amaxes[node])
                else:
                    _launch_rows(graph, node, results)
            replace_results(graph, node, results)
        return PassReport(len(nodes), "quantizes launched")


def _launch_blocks(
    graph: fx.Graph, node: fx.Node, results: tuple[fx.Node, ...], along_rows: bool, along_columns: bool
) -> None:
    from fp8_compile.kernels.gpu import quantize_blocks as kernels

    x, dtype, block, multiple, via = arguments(node)
    programs, *sizes = inline(graph, kernels.launch_sizes, x, multiple, like=node)
    constants = kernels.launch_constants(dtype, block[0] != 1, via, along_rows, along_columns)
    tensors = {"x_ptr": x, **_pointers(results, along_rows, along_columns)}
    scalars = {**dict(zip(SIZES, sizes)), **constants}
    kernel = kernels.quantize_blocks_kernel
    call_triton(graph, kernel, (programs, 1, 1), tensors, scalars, like=node, num_warps=kernels.NUM_WARPS)


def _launch_rows_columns(
    graph: fx.Graph, node: fx.Node, results: tuple[fx.Node, ...], along_rows: bool, bits: fx.Node
) -> None:
    from fp8_compile.kernels.gpu import quantize_rows as kernels

    x, dtype, _, multiple, via = arguments(node)
    programs, *sizes, padded = inline(graph, kernels.tile_sizes, x, multiple, like=node)
    common = {**dict(zip(SIZES, sizes)), **kernels.tile_constants(via, along_rows)}
    tensors = {"x_ptr": x, "bits_ptr": bits}
    launch: dict[str, Any] = {"like": node, "num_warps": kernels.TILE_WARPS}
    call_triton(graph, kernels.row_column_amax_kernel, (programs, 1, 1), tensors, common, **launch)
    tensors |= _pointers(results, along_rows, True)
    scalars = {**common, "padded": padded, "LARGEST": format_of(dtype).max}
    call_triton(graph, kernels.cast_rows_columns_kernel, (programs, 1, 1), tensors, scalars, **launch)


def _launch_rows(graph: fx.Graph, node: fx.Node, results: tuple[fx.Node, ...]) -> None:
    from fp8_compile.kernels.gpu import quantize_rows as kernels

    x, dtype, _, multiple, via = arguments(node)
    _, rows, *sizes, _ = inline(graph, kernels.tile_sizes, x, multiple, like=node)
    constants = kernels.row_constants(value(x).shape[1], dtype, via=via)
    tensors = {"x_ptr": x, "q_ptr": results[Q], "dequant_ptr": results[DEQUANT]}
    scalars = {**dict(zip(SIZES[1:], sizes)), **constants}
    kernel = kernels.quantize_rows_kernel
    call_triton(graph, kernel, (rows, 1, 1), tensors, scalars, like=node, num_warps=kernels.ROW_WARPS)


def _pointers(results: tuple[fx.Node, ...], along_rows: bool, along_columns: bool) -> dict[str, fx.Node]:
    """A layout that is not made is not allocated: the kernel gets the other one's tensors in its place, and writes
    nothing there."""
    rows, columns = results[Q : DEQUANT + 1], results[Q_T : DEQUANT_T + 1]
    (q, dequant), (q_t, dequant_t) = rows if along_rows else columns, columns if along_columns else rows
    return {"q_ptr": q, "q_t_ptr": q_t, "dequant_ptr": dequant, "dequant_t_ptr": dequant_t}


def _amaxes(graph: fx.Graph, nodes: list[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Node -> zeros for the amaxes of its rows and columns.

    Each node has a buffer of its own. With a common one the scheduler would think that the kernels of a tensor depend
    on those of the tensor before it. Inductor fills the buffers of a list with one kernel; a size that is a symbol is
    known only where its tensor is.
    """
    nodes = [node for node in nodes if arguments(node)[2][1] == WHOLE and _read(node) & {Q_T, DEQUANT_T}]
    static = [node for node in nodes if all(isinstance(size, int) for size in value(input_of(node)).shape)]
    found = {}
    for node in nodes:
        if node not in static:
            with graph.inserting_before(node):
                found[node] = inline(graph, _zeros, input_of(node), like=node)
    if static:
        with graph.inserting_before(first_call(graph)):
            sizes = [sum(value(input_of(node)).shape) for node in static]
            options: dict[str, Any] = {"dtype": torch.int32, "device": value(input_of(static[0])).device}
            empty = [emit(graph, aten.empty.memory_format, [size], like=static[0], **options) for size in sizes]
            zeros = emit(graph, aten._foreach_mul.Scalar, empty, 0, like=empty[0])
            found |= {node: getitem(graph, zeros, index) for index, node in enumerate(static)}
    return found


def _zeros(x: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(x.shape[0] + x.shape[1], dtype=torch.int32)


def _read(node: fx.Node) -> set[int]:
    """Which of the results this graph reads."""
    return {arguments(user)[1] for user in node.users if user.users}
