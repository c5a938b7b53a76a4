"""What is in memory is quantized for both its gemms by one op; what Inductor computes is left to it."""

from __future__ import annotations

import functools
import operator
from typing import Any

import expecttest
import pytest
import torch
from graph_text import describe, op_name, ops, render
from joint_graph import (
    JointGraph,
    apply,
    assert_gpu_accepts,
    assert_same_results,
    copy_graph,
    joint_graph,
    make,
    random_inputs,
    split,
)
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from fp8_compile.passes.graph.views import root_of
from fp8_compile.passes.joint.pair_quantizes import PairQuantizes
from fp8_compile.passes.joint.rewrite_matmuls import RewriteMatmuls
from fp8_compile.passes.joint.share_quantizes import ShareQuantizes

BF16 = torch.bfloat16
each_recipe = pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])


def before_and_after(joint: JointGraph, recipe: str, **options: Any) -> tuple[fx.Graph, fx.Graph, int]:
    graph, rules = joint.copy(), make("cuda:90", recipe=recipe, **options)
    apply(RewriteMatmuls(rules, joint.names), graph)
    apply(ShareQuantizes(), graph)
    before = copy_graph(graph)
    return before, graph, apply(PairQuantizes(), graph)


@functools.cache
def linear(tokens: int = 144, bias: bool = False, dtype: torch.dtype = BF16, dynamic: bool = False) -> JointGraph:
    layer = nn.Linear(256, 384, bias=bias, dtype=dtype)
    return joint_graph(layer, torch.randn(tokens, 256, dtype=dtype, requires_grad=True), dynamic=dynamic)


def paired(graph: fx.Graph) -> list[str]:
    """The tensors that are quantized both ways, as text."""
    return sorted(describe(node.args[0].meta["val"]) for node in graph.nodes if op_name(node) == "quantize_both")


def test_golden_of_a_linear_under_blockwise() -> None:
    before, after, changes = before_and_after(linear(), "blockwise")
    assert (ops(before)["quantize"], changes, "quantize" in ops(after)) == (5, 3, False)
    assert assert_gpu_accepts(after) == 3
    assert_same_results(before, after, random_inputs(before))
    expecttest.assert_expected_inline(render(after), """\
primals_1: bf16[384, 256]
primals_2: bf16[144, 256]
tangents_1: bf16[144, 384]
quantize_both: (e4m3[144, 256], f32[144, 2]T, e4m3[256, 256], f32[256, 2]T) = quantize_both(primals_2, e4m3, [1,
    128], 128, None)
quantize_both_1: (e4m3[384, 256], f32[3, 2]{4, 1}, e4m3[256, 384], f32[2, 3]{4, 1}) = quantize_both(primals_1, e4m3,
    [128, 128], 1, None)
_scaled_mm: bf16[144, 384] = _scaled_mm(quantize_both[0], quantize_both_1[0].T, quantize_both[1],
    quantize_both_1[1].T, fast_accum)
quantize_both_2: (e4m3[144, 384], f32[144, 3]T, e4m3[384, 256], f32[384, 2]T) = quantize_both(tangents_1, e4m3, [1,
    128], 128, None)
_scaled_mm_1: bf16[384, 256] = _scaled_mm(quantize_both_2[2], quantize_both[2].T, quantize_both_2[3],
    quantize_both[3].T)
_scaled_mm_2: bf16[144, 256] = _scaled_mm(quantize_both_2[0], quantize_both_1[2].T, quantize_both_2[1],
    quantize_both_1[3].T)
return _scaled_mm, _scaled_mm_1, _scaled_mm_2
""")


@pytest.mark.parametrize(
    "recipe, tokens, dtype, dynamic",
    [("rowwise", 144, BF16, False), ("rowwise", 70, torch.float32, False), ("blockwise", 70, BF16, True)],
    ids=["round", "padded, gemms write bf16", "symbolic tokens"],
)
def test_results_are_the_same_bits(recipe: str, tokens: int, dtype: torch.dtype, dynamic: bool) -> None:
    before, after, changes = before_and_after(linear(tokens, False, dtype, dynamic), recipe)
    assert (changes, ops(after)["quantize_both"], "quantize" in ops(after)) == (3, 3, False)
    if not dynamic:
        assert assert_gpu_accepts(after) == 3
    assert_same_results(before, after, random_inputs(before))


class Block(nn.Module):
    """A norm, an activation, a residual."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.up, self.down = nn.Linear(128, 256, bias=False), nn.Linear(256, 128, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@each_recipe
def test_weights_and_gradients_from_outside_are_paired_and_an_activation_is_not(recipe: str, norm: Any) -> None:
    joint = joint_graph(Block(norm(128)), torch.randn(2, 72, 128, requires_grad=True))
    before, after, _ = before_and_after(joint, recipe)
    weights, tangent, normed = ["f32[128, 256]", "f32[256, 128]"], "f32[144, 128]", "f32[144, 128]"
    assert paired(after) == sorted([*weights, tangent, *([normed] if recipe == "blockwise" else [])])
    left = {describe(node.args[0].meta["val"]) for node in after.nodes if op_name(node) == "quantize"}
    assert left == {"f32[144, 256]", *([normed] if recipe == "rowwise" else [])}  # the activation, and its gradient
    assert_same_results(before, after, random_inputs(before))


@each_recipe
def test_results_of_gemms_and_attention_are_paired_through_their_views(recipe: str) -> None:
    first, second, third = (nn.Linear(256, 256, bias=False, dtype=BF16) for _ in range(3))

    def model(x: Tensor) -> Tensor:
        y = first(x).view(2, 64, 2, 128).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(y, y, y).transpose(1, 2)
        return third(second(y.reshape(2, 64, 256)))

    joint = joint_graph(model, torch.randn(2, 64, 256, dtype=BF16, requires_grad=True))
    before, after, _ = before_and_after(joint, recipe)
    roots = [root_of(node.args[0]) for node in after.nodes if op_name(node) == "quantize_both"]
    computed = [op_name(root.args[0] if root.target is operator.getitem else root) for root in roots if root.args]
    # Forward: attention's output, the second layer's. Backward: the third layer's gradient by its input; the gradient
    # of y is a sum of three, and so not in memory.
    assert sorted(computed) == ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_mm", "_scaled_mm"]
    assert_same_results(before, after, random_inputs(before))


def test_a_gradient_that_is_summed_for_a_bias_is_paired_in_blocks_alone() -> None:
    """The sum goes along columns, as their amax does: Inductor makes one read of both."""
    joint = linear(144, True)
    tangent = "bf16[144, 384]"
    assert tangent in paired(before_and_after(joint, "blockwise")[1])
    assert paired(before_and_after(joint, "rowwise")[1]) == ["bf16[144, 256]", "bf16[384, 256]"]


def test_a_weight_that_autocast_rounds_is_read_as_it_is() -> None:
    layer = nn.Linear(256, 384, bias=False)

    def model(x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return layer(x)

    joint = joint_graph(model, torch.randn(2, 72, 256, requires_grad=True))
    before, after, changes = before_and_after(joint, "blockwise")
    assert changes == 3 and paired(after) == ["bf16[144, 384]", "f32[144, 256]", "f32[384, 256]"]
    vias = {node.args[4] for node in after.nodes if op_name(node) == "quantize_both"}
    assert vias == {None, BF16}
    assert_same_results(before, after, random_inputs(before))


def test_rows_alone_of_an_input_are_left_and_of_a_weights_tiles_not() -> None:
    layer = nn.Linear(256, 384, bias=False, dtype=BF16).requires_grad_(False)
    joint = joint_graph(layer, torch.randn(144, 256, dtype=BF16))  # inference
    assert before_and_after(joint, "rowwise")[2] == 0
    assert paired(before_and_after(joint, "blockwise")[1]) == ["bf16[384, 256]"]


def test_gradients_rounded_at_random_and_sizes_that_are_padded_both_ways_are_left() -> None:
    _, after, _ = before_and_after(linear(), "blockwise", stochastic_rounding=True)
    assert paired(after) == ["bf16[144, 256]", "bf16[384, 256]"]
    odd = joint_graph(nn.Linear(250, 380, bias=False), torch.randn(144, 250, requires_grad=True))
    before, after, _ = before_and_after(odd, "rowwise")
    assert_same_results(before, after, random_inputs(before))
    assert all("250" not in text for text in paired(after))


@each_recipe
def test_a_checkpointed_layer_makes_rows_in_forward_and_what_backward_reads_in_backward(recipe: str) -> None:
    layers = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Tanh(), nn.Linear(256, 128, bias=False))
    x = torch.randn(128, 128, requires_grad=True)
    made = split(lambda x: checkpoint(layers, x, use_reentrant=False), x, target="cuda:90", recipe=recipe)
    assert not any("e4m3" in text for text in made.saved_activations)
    read = [
        {user.args[1] for user in node.users}
        for graph in (made.forward, made.backward)
        for node in graph.nodes
        if op_name(node) == "quantize_both"
    ]
    assert {0, 1} in read and all(one & {2, 3} for one in read[-2:])
