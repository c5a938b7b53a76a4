"""Let Inductor generate the code that reads unpacked weights and caches for a single token."""

from __future__ import annotations

import math
from typing import Callable

import torch
from torch import Tensor, fx

from fp8_compile.kernels.materialize import materialize_op

from ..graph.arguments import arguments, input_of
from ..graph.emit import emit, inline, value
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
MULTIPLIED = (torch.bfloat16, torch.float32)


class DecomposeSingleRow(GraphPass):
    """Decompose products and attention of one row into plain ops, once the graph is split.

    Before:  y: bf16[1, N] = addmm(bias, x, permute(w))
             a: bf16[B, H, 1, D] = _scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)[0]
    After:   x, q stored, so that a loop over w or k reads them and does not compute them
             y = bf16(sum_k(fp32(x) * fp32(w)) + bias)
             p = exp(s - max(s)), s = sum_d(fp32(q) * fp32(k)) / sqrt(D) + mask
             a = bf16(sum_s(p * fp32(v)) / sum_s(p))

    Both read a large tensor once and do little with it. oneDNN's and MKL's products read at half of the memory's speed
    or less, and the attention copies keys and values into tiles that are made for many queries; Inductor's loops read
    as fast as the memory allows. Sums are in FP32, as they were.

    Skips: more rows, or a number that is not known; products in FP16, in which oneDNN is as fast; weights that are not
    contiguous along K; attention with dropout, a causal mask, or a logsumexp that backward reads.
    """

    def run(self, graph: fx.Graph) -> PassReport:
        changes = 0
        for node in list(graph.nodes):
            if _is_product(node):
                *bias, x, weight = arguments(node)
                _replace(graph, node, node, multiply_row, x, weight, *bias)
                changes += 1
            elif _is_attention(node):
                for result in list(node.users):
                    if result.users:
                        _replace(graph, result, node, attend_once, *arguments(node)[:3], *_mask_and_scale(node))
                    else:
                        graph.erase_node(result)
                graph.erase_node(node)  # torch takes it for a random op, which is never dead code
                changes += 1
        return PassReport(changes, "products and attentions of one row")


def multiply_row(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [1, K], weight [K, N] whose columns are stored one after the other, bias [N] -> [1, N]."""
    y = (x.float() * weight.t().float()).sum(-1)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).view(1, -1)


def attend_once(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """query [B, heads, 1, D], key and value [B, groups, S, D], mask of any shape that goes with [B, heads, 1, S]
    -> [B, heads, 1, D]; zeros where the mask leaves no key."""
    batch, heads, _, width = query.shape
    groups, length = key.shape[1:3]
    wide = torch.float32 if query.dtype in SIXTEEN_BITS else query.dtype
    q = query.to(wide).view(batch, groups, heads // groups, 1, width)
    scores = (q * key.to(wide).unsqueeze(2)).sum(-1) * (1 / math.sqrt(width) if scale is None else scale)
    if mask is not None:
        seen = mask.expand(batch, heads, 1, length).view(batch, groups, heads // groups, length)
        blocked = torch.where(seen, 0.0, -math.inf) if seen.dtype == torch.bool else seen.to(wide)
        scores = scores + blocked
    largest = scores.amax(-1, keepdim=True)
    exponentials = (scores - torch.where(largest == -math.inf, 0.0, largest)).exp()
    total = exponentials.sum(-1, keepdim=True)
    mixed = (exponentials.unsqueeze(-1) * value.to(wide).unsqueeze(2)).sum(-2)
    return (mixed / torch.where(total == 0, 1.0, total)).to(query.dtype).view(batch, heads, 1, width)


def _is_product(node: fx.Node) -> bool:
    if node.target not in (aten.mm.default, aten.addmm.default) or node.kwargs not in ({}, {"beta": 1, "alpha": 1}):
        return False
    x, weight = (value(side) for side in arguments(node)[-2:])
    one = isinstance(x.shape[0], int) and x.shape[0] == 1
    along_k = isinstance(weight.stride(0), int) and weight.stride(0) == 1
    return one and along_k and x.device.type == "cpu" and x.dtype in MULTIPLIED and weight.dtype == x.dtype


def _is_attention(node: fx.Node) -> bool:
    if node.target is not aten._scaled_dot_product_flash_attention_for_cpu.default:
        return False
    if any(user.args[1] != 0 and user.users for user in node.users):
        return False
    queries = value(input_of(node)).shape[2]
    plain = not any((*node.args[3:], node.kwargs.get("dropout_p"), node.kwargs.get("is_causal")))
    return isinstance(queries, int) and queries == 1 and plain


def _mask_and_scale(node: fx.Node) -> tuple[object, object]:
    return node.kwargs.get("attn_mask"), node.kwargs.get("scale")


def _replace(
    graph: fx.Graph, node: fx.Node, like: fx.Node, function: Callable[..., Tensor], row: fx.Node, *args: object
) -> None:
    with graph.inserting_before(node):
        opened = inline(graph, function, emit(graph, materialize_op, row, like=like), *args, like=like)
    node.replace_all_uses_with(opened)
    graph.erase_node(node)
