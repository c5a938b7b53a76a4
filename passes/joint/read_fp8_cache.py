"""Attention of a few queries over a cache in FP8, from the cache's own bytes."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from fp8_compile.kernels.fp8_cache import attention_op, dequantize_op

from ..graph.arguments import arguments, named_arguments
from ..graph.emit import emit, value
from ..graph.views import ALIASES, REPEATS, RESHAPES, SIZES_OF_ONE, through
from ..graph_pass import GraphPass, PassReport

aten = torch.ops.aten

MOST_QUERIES = 16  # of which C++ computes attention as fast as it reads; for more, keys and values are dequantized
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
REPEATED = RESHAPES | SIZES_OF_ONE | REPEATS | ALIASES


@dataclasses.dataclass(frozen=True)
class _Attention:
    node: fx.Node
    query: fx.Node
    keys: fx.Node  # dequantize nodes
    values: fx.Node
    mask: fx.Node | None
    scale: float
    is_causal: bool


class ReadFp8Cache(GraphPass):
    """Replace attention over dequantized keys and values by one op that reads the bytes.

    Before:  k: bf16[B, G, S, D] = fp8_cache_dequantize(keys, key_scales, bf16)
             v: bf16[B, G, S, D] = fp8_cache_dequantize(values, value_scales, bf16)
             y: bf16[B, H, Q, D] = _scaled_dot_product_flash_attention_for_cpu(q, repeat(k), repeat(v),
                                                                               attn_mask=mask)[0]
    After:   y: bf16[B, H, Q, D] = fp8_attention(q, keys, values, key_scales, value_scales, mask, scale, is_causal)

    Skips: more than 16 queries, or a number that is not known, where the dequantized tensors are read often enough to
    pay; dropout; a logsumexp that something reads; heads that are repeated in another order, where neighbours do not
    share a key.
    """

    @staticmethod
    def applies(graph: fx.Graph) -> bool:
        return any(node.target is dequantize_op for node in graph.nodes)

    def run(self, graph: fx.Graph) -> PassReport:
        found = [one for node in graph.nodes if node.target is FLASH and (one := _find(node)) is not None]
        for one in found:
            _replace(graph, one)
        return PassReport(len(found), "attentions over caches in FP8")


def _find(node: fx.Node) -> _Attention | None:
    given = named_arguments(node)
    query, queries = given["query"], value(given["query"]).shape[2]
    keys, values = (_dequantized(given[side], value(query).shape[1]) for side in ("key", "value"))
    if keys is None or values is None or given.get("dropout_p") or not isinstance(queries, int):
        return None
    if queries > MOST_QUERIES or any(user.args[1] != 0 and user.users for user in node.users):
        return None
    scale = given.get("scale")
    scale = 1 / math.sqrt(value(query).shape[-1]) if scale is None else scale
    mask = given.get("attn_mask")
    if mask is not None and value(mask).dim() != 4:
        return None
    return _Attention(node, query, keys, values, mask, scale, bool(given.get("is_causal")))


def _dequantized(node: fx.Node, heads: int) -> fx.Node | None:
    """The dequantize of which ``node`` is the result, or the result with each group repeated for neighbouring heads."""
    root = through(node, REPEATED)
    if root.target is not dequantize_op:
        return None
    whole, repeated = value(root).shape, value(node).shape
    if repeated == whole:
        return root if through(node, ALIASES | {aten.clone.default}) is root else None
    if len(repeated) != 4 or repeated[1] != heads or (repeated[0], *repeated[2:]) != (whole[0], *whole[2:]):
        return None
    # [B, G, S, D] -> [B, G, 1, S, D] -> [B, G, R, S, D] -> [B, G * R, S, D]
    while node is not root:
        shape = value(node).shape
        if len(shape) == 5 and (shape[0], shape[1], *shape[3:]) != tuple(whole):
            return None
        node = node.all_input_nodes[0]
    return root


def _replace(graph: fx.Graph, one: _Attention) -> None:
    rows, scales = zip(*((arguments(side)[0], arguments(side)[1]) for side in (one.keys, one.values)))
    with graph.inserting_before(one.node):
        result = emit(graph, attention_op, one.query, *rows, *scales, one.mask, one.scale, one.is_causal, like=one.node)
    for user in list(one.node.users):
        if user.users:
            user.replace_all_uses_with(result)
        graph.erase_node(user)
    graph.erase_node(one.node)  # torch takes it for a random op, which is never dead code
