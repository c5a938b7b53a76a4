"""Decompose the fused inference ops of ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention``.

In eval mode without gradients these modules call one opaque op for a whole layer, which hides its matmuls from
every graph pass. The same layer in plain operations shows them; Inductor fuses what is left.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fp8_compile.torch_internals.graphs import ENCODER_LAYER, MULTI_HEAD_ATTENTION

# Values of ``mask_type``: what the dimensions of a mask are. True or non-zero: not attended to.
ATTENTION_MASK, PADDING_MASK = 0, 1  # [T, T]; [B, T]; otherwise [B, heads, T, T]


def decompose_fused_ops(gm: fx.GraphModule) -> int:
    """Replace the opaque ops of a Dynamo graph, in place; how many there were."""
    opened = 0
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _OPENED:
            node.target = _OPENED[node.target]
            opened += 1
    if opened:
        gm.recompile()
    return opened


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``torch._native_multi_head_attention``: query, key, value [B, T, D] -> [B, T, D] and the weights."""
    batch, _, width = query.shape
    if query is key and key is value:
        projected = F.linear(query, qkv_weight, qkv_bias).chunk(3, dim=-1)
    else:
        weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
        projected = tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    q, k, v = (x.unflatten(-1, (num_heads, width // num_heads)).transpose(1, 2) for x in projected)
    keep = None if mask is None else ~_broadcastable(mask, mask_type)
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // num_heads)
        attention = (scores if keep is None else scores.masked_fill(~keep, -math.inf)).softmax(-1)
        mixed, weights_out = attention @ v, attention.mean(1) if average_attn_weights else attention
    else:
        mixed, weights_out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep), None
    merged = mixed.transpose(1, 2).reshape(batch, -1, width)
    return F.linear(merged, proj_weight, proj_bias), weights_out


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """``torch._transformer_encoder_layer_fwd``: src [B, T, D] -> [B, T, D]."""

    def attend(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, False, mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        src = src + attend(norm_1(src))
        return src + feed_forward(norm_2(src))
    src = norm_1(src + attend(src))
    return norm_2(src + feed_forward(src))


def _broadcastable(mask: Tensor, mask_type: int | None) -> Tensor:
    mask = mask.to(torch.bool)
    if mask_type == PADDING_MASK:
        return mask[:, None, None, :]
    return mask


_OPENED = {
    ENCODER_LAYER: encoder_layer,
    MULTI_HEAD_ATTENTION: multi_head_attention,
}
