"""What forward keeps for backward: FP8 wherever nothing else needs the tensor in high precision."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from graph_text import describe, op_name, ops
from grouped import Experts, offsets_of
from joint_graph import Split, split
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

TARGETS = pytest.mark.parametrize("target", ["cpu", "cuda:90"])
AND_ANY_LAYOUT = pytest.mark.parametrize("target", ["cpu", "cuda:90", "cuda:100"])
BF16 = torch.bfloat16


class Mlp(nn.Module):
    """Two layers with an activation between them: 128 -> 256 -> 128."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = torch.neg, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(128, 256, bias=False, dtype=dtype)
        self.down = nn.Linear(256, 128, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def given(dtype: torch.dtype = BF16) -> Tensor:
    """16 tokens."""
    return torch.randn(2, 8, 128, dtype=dtype, requires_grad=True)


@functools.cache  # nothing below changes it
def mlp(target: str, recipe: str = "tensorwise") -> Split:
    return split(Mlp(), given(), target=target, recipe=recipe)


def saved_bytes(made: Split) -> int:
    """Without the model's own weights and inputs, which are there anyway."""
    kept = [node.meta["val"] for node in made.saved if not node.name.startswith("primals")]
    return sum(tensor.numel() * tensor.element_size() for tensor in kept)


def saved_inputs(made: Split) -> list[str]:
    return [describe(node.meta["val"]) for node in made.saved if node.name.startswith("primals")]


@TARGETS
def test_inputs_of_both_layers_are_saved_in_fp8(target: str) -> None:
    made = mlp(target)
    assert len(made.report.rewritten) == 6
    assert sorted(made.saved_activations) == ["e4m3[16, 128]", "e4m3[16, 256]"]
    assert saved_inputs(made) == ["bf16[256, 128]", "bf16[128, 256]"]  # the weights, and not x


@TARGETS
def test_half_of_what_full_precision_saves_is_saved(target: str) -> None:
    fp8 = mlp(target)
    plain = split(Mlp(), given(), target=target, exclude=("up", "down"))
    assert len(plain.report.rewritten) == 0
    assert sorted(plain.saved_activations) == ["bf16[16, 128]", "bf16[16, 256]"]
    scales = saved_bytes(fp8) - saved_bytes(plain) / 2
    assert 0 < scales <= 100


@TARGETS
def test_the_mask_of_relu_is_saved_beside_the_fp8_tensor(target: str) -> None:
    made = split(Mlp(torch.relu, torch.float32), given(torch.float32), target=target)
    assert sorted(made.saved_activations) == ["b8[2, 8, 256]", "e4m3[16, 128]", "e4m3[16, 256]"]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_recipes_with_many_scales_save_fp8_too(recipe: str) -> None:
    """These quantize an input along its tokens for grad_weight: that copy is made in forward, not its source kept."""
    made = mlp("cpu", recipe)
    assert len(made.report.rewritten) == 6
    assert sorted(text for text in made.saved_activations if "[16," in text) == ["e4m3[16, 128]", "e4m3[16, 256]"]
    assert saved_inputs(made) == ["bf16[256, 128]", "bf16[128, 256]"]


@pytest.mark.parametrize("recipe, tokens", [("rowwise", 16), ("blockwise", 128)])
def test_many_scales_on_a_gpu_save_the_fp8_copies_that_backward_reads_and_no_weight(recipe: str, tokens: int) -> None:
    made = mlp("cuda:90", recipe)
    assert len(made.report.rewritten) == 6 and saved_inputs(made) == []
    # Transposed: x, and both weights. The second layer's input is computed, and quantized where that happens.
    weights = ["e4m3[128, 256]T", "e4m3[256, 128]T"]
    large = [text for text in made.saved_activations if text.startswith("e4m3")]
    assert sorted(large) == sorted([f"e4m3[{tokens}, 128]T", "e4m3[16, 256]", *weights])


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_where_any_layout_is_read_the_bytes_that_forward_wrote_are_saved_and_no_weight_is_quantized_again(
    recipe: str,
) -> None:
    made = mlp("cuda:100", recipe)
    assert len(made.report.rewritten) == 6
    assert not any(text.startswith("bf16") for text in saved_inputs(made)), "neither x nor a weight"
    large = [text for text in made.saved_activations if text.startswith(("e4m3", "bf16"))]
    assert sorted(large) == ["e4m3[128, 256]", "e4m3[16, 128]", "e4m3[16, 256]", "e4m3[256, 128]"]
    # What an activation function needs itself is saved; the FP8 tensor after it is made again.
    gelu = split(Mlp(nn.functional.gelu), given(), target="cuda:100", recipe=recipe)
    activations = [text for text in gelu.saved_activations if "[16, " in text]
    assert sorted(activations) == ["bf16[16, 256]", "e4m3[16, 128]"]


@pytest.mark.parametrize(
    "target, recipe",
    [("cpu", "tensorwise"), ("cuda:90", "tensorwise"), ("cpu", "rowwise"), ("cpu", "blockwise")],
)
def test_no_upcast_and_no_transposed_copy_is_saved(target: str, recipe: str) -> None:
    kept = [node.meta["val"] for node in mlp(target, recipe).saved if not node.name.startswith("primals")]
    large = [tensor for tensor in kept if tensor.numel() >= 16 * 128]
    assert large and {tensor.dtype for tensor in large} <= {torch.float8_e4m3fn, BF16}
    # Tokens come first in all of them: [16, ...] or [2, 8, ...], never [128, 16] or [256, 16].
    assert all(tensor.is_contiguous() and tensor.shape[0] in (2, 16) for tensor in large)


@TARGETS
def test_what_an_activation_function_needs_itself_is_saved_once_and_not_in_fp8_too(target: str) -> None:
    made = split(Mlp(nn.functional.gelu), given(), target=target)
    # gelu's backward reads what went in; the FP8 copy of what came out is made again from that.
    assert sorted(made.saved_activations) == ["bf16[16, 256]", "e4m3[16, 128]"]


@TARGETS
def test_an_excluded_layer_keeps_its_input_in_high_precision(target: str) -> None:
    made = split(Mlp(), given(), target=target, exclude=("up",))
    assert len(made.report.rewritten) == 3
    assert sorted(made.saved_activations) == ["bf16[16, 128]", "e4m3[16, 256]"]


@AND_ANY_LAYOUT
def test_nothing_is_reduced_twice(target: str) -> None:
    made = mlp(target)
    # Two gradients are new in backward; the scales of inputs and weights come from forward.
    reductions = "scales" if target == "cpu" else "amax"
    amaxes = [node for node in made.backward.nodes if op_name(node) == reductions]
    assert (len(amaxes), ops(made.backward).get("reciprocal", 4)) == (2, 4)
    assert {node.args[0].meta["val"].shape for node in amaxes} == {(16, 128), (16, 256)}


@AND_ANY_LAYOUT
def test_a_checkpointed_block_saves_its_input_alone(target: str) -> None:
    mlp = Mlp()

    def region(x: Tensor) -> Tensor:
        return checkpoint(mlp, torch.sin(x), use_reentrant=False)

    made = split(region, given(), target=target)
    assert len(made.report.rewritten) == 6
    assert [text for text in made.saved_activations if "256" in text] == []
    assert saved_bytes(made) <= 2 * 16 * 128 + 100


@AND_ANY_LAYOUT
def test_selective_checkpointing_that_saves_matmuls_saves_their_results_and_no_quantized_weight(target: str) -> None:
    block = Mlp(nn.functional.silu)
    matmuls = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def region(x: Tensor) -> Tensor:
        return torch.sin(checkpoint(block, torch.sin(x), use_reentrant=False, context_fn=matmuls))

    made = split(region, given(), target=target)
    assert len(made.report.rewritten) == 6
    assert {"bf16[16, 256]", "bf16[16, 128]"} <= set(made.saved_activations)
    assert not {"e4m3[256, 128]", "e4m3[128, 256]"} & set(made.saved_activations)


@TARGETS
def test_query_key_and_value_save_one_copy_of_their_input(target: str) -> None:
    class QueryKeyValue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(128, 256, bias=False, dtype=BF16)
            self.q, self.k, self.v = (nn.Linear(256, 128, bias=False, dtype=BF16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            return self.q(x) + self.k(x) + self.v(x)

    made = split(QueryKeyValue(), given(), target=target)
    assert len(made.report.rewritten) == 12
    assert sorted(made.saved_activations) == ["e4m3[16, 128]", "e4m3[16, 256]"]


class MlpOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Experts(4, 128, 256, dtype=BF16), Experts(4, 256, 128, dtype=BF16)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.down(torch.neg(self.up(x, offsets)), offsets)


def test_tokens_of_experts_are_saved_in_fp8_and_no_copy_of_their_weights_is() -> None:
    x = torch.randn(16, 128, dtype=BF16, requires_grad=True)
    made = split(MlpOfExperts(), x, offsets_of(9, 0, 5, 2), recipe="tensorwise")
    assert len(made.report.rewritten) == 6
    assert sorted(made.saved_activations) == ["e4m3[16, 128]", "e4m3[16, 256]"]
    assert saved_inputs(made) == ["bf16[4, 256, 128]", "i32[4]", "bf16[4, 128, 256]"]  # the weights, and not x
