"""FP8 inputs times a packed FP8 weight, as nodes of a graph.

Before:  y: bf16[M, N] = addmm(bias, round_inputs(x, scale), permute(fp8_dequantize(codes, scales)))
CPU:     q, s = fp8_compile.quantize_inputs(x, scale)                        s: [1, 1] where scale is, else [M, 1]
         y: bf16[M, N] = fp8_compile.scaled_mm(q, permute(codes), s, scales[None], bias, bf16)
GPU:     y: bf16[M, N] = _scaled_mm(q, permute(codes), s [M, 1], scales[None], bias)      rowwise: it writes bf16
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op
from fp8_compile.kernels.fp8_inputs import quantize_inputs, quantize_inputs_op

from ..graph.emit import emit, getitem, inline, replace_results, value
from ..graph.marks import Kind, Mark

aten, prims = torch.ops.aten, torch.ops.prims
ALIGNMENT = 16  # of N and K, for the tensor cores


def reason_against_fp8(shape: Sequence[int | torch.SymInt], target: str) -> str | None:
    """Why an [M, K] @ [K, N] product can't be an FP8 gemm of the target, or None."""
    if target == "cpu":
        return None
    if target.startswith("hip"):
        return f"{target} multiplies E4M3 of another kind"
    _, n, k = shape
    odd = [f"{name}={size}" for name, size in (("N", n), ("K", k)) if not statically_known_true(size % ALIGNMENT == 0)]
    return f"{target} wants multiples of {ALIGNMENT}, not {', '.join(odd)}" if odd else None


def multiply_fp8(
    graph: fx.Graph,
    x: fx.Node,
    input_scale: fx.Node | None,
    codes: Any,
    scales: Any,
    bias: fx.Node | None,
    target: str,
    *,
    like: fx.Node,
) -> fx.Node:
    """``x @ dequantize(codes, scales).T + bias`` at the graph's insertion point, with the metadata of ``like``."""
    dtype: torch.dtype = value(like).dtype
    right = emit(graph, aten.permute.default, codes, [1, 0], like=like)
    scale_right = emit(graph, aten.unsqueeze.default, scales, 0, like=like)
    mark = Mark(kind=Kind.GEMM)
    both = emit(graph, quantize_inputs_op, x, input_scale, like=like)
    q, scale_left = getitem(graph, both, 0), getitem(graph, both, 1)
    if target == "cpu":
        operands = q, right, scale_left, scale_right, bias
        return emit(graph, scaled_mm_op, *operands, dtype, like=like, mark=mark)
    scale_left = inline(graph, _one_scale_per_row, scale_left, q, like=like)
    sides = q, right, scale_left, scale_right
    written: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    y = emit(graph, aten._scaled_mm.default, *sides, **written, like=like, mark=mark)
    if dtype != torch.bfloat16:
        y = emit(graph, prims.convert_element_type.default, y, dtype, like=like)
    return y if bias is None else emit(graph, aten.add.Tensor, y, bias, like=like)


def _one_scale_per_row(scale: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return scale.expand(q.shape[0], 1).contiguous()


def lower_quantize_inputs(graph: fx.Graph) -> int:
    """Put the formula in place of ``quantize_inputs``, for Inductor to fuse with what makes x; on a CPU it is C++."""
    nodes = graph.find_nodes(op="call_function", target=quantize_inputs_op)
    for node in nodes:
        with graph.inserting_before(node):
            results = inline(graph, quantize_inputs, *node.args, like=node)
        replace_results(graph, node, results)
    return len(nodes)
