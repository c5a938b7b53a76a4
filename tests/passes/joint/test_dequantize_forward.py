"""Backward products in high precision: of the original tensors, or of what forward multiplied."""

from __future__ import annotations

from collections.abc import Callable

import expecttest
import pytest
import torch
from graph_text import ops, render
from grouped import Experts, offsets_of
from joint_graph import assert_numbers, joint_graph, make, random_inputs, run, run_passes, split
from torch import Tensor, nn

from fp8_compile.kernels.mxfp8 import dequantize_mx, quantize_mx
from fp8_compile.kernels.nvfp4_training import dequantize_nvfp4, global_scale, quantize_nvfp4
from fp8_compile.kernels.quantize import dequantize, quantize

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
TOKENS, K, N = 64, 128, 256
RECIPES = ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]


def values(x: Tensor, recipe: str, *, weight: bool) -> Tensor:
    """What a recipe makes of [tokens, K], or of a weight [N, K]."""
    if recipe in ("mxfp8", "blockwise by mxfp8"):
        size = 32 if recipe == "mxfp8" else 128
        block = (size, size) if weight else (1, size)
        return dequantize_mx(*quantize_mx(x, block), block)
    if recipe == "nvfp4":
        enc, dequant = global_scale(x)
        parts = quantize_nvfp4(x, enc, (16, 16) if weight else (1, 16), False, False, None, 0, False)
        return dequantize_nvfp4(*parts)[:, : x.shape[1]] * dequant
    block = {"tensorwise": (-1, -1), "rowwise": (1, -1), "blockwise": (128, 128) if weight else (1, 128)}[recipe]
    return dequantize(*quantize(x, E4M3, block), block)


def rounded(x: Tensor, recipe: str, *, weight: bool) -> Tensor:
    """The same in FP64, with the gradient of the identity."""
    return x + (values(x.detach().float(), recipe, weight=weight).double() - x).detach()


def product(recipe: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, x: rounded(x, recipe, weight=False) @ rounded(w, recipe, weight=True).t()


def linear(inputs: int = K, outputs: int = N) -> tuple[nn.Module, Tensor]:
    return nn.Linear(inputs, outputs, bias=False), torch.randn(TOKENS, inputs, requires_grad=True)


@pytest.mark.parametrize("target", ["cpu", "cuda:90", "cuda:100"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_dequantized_gradients_are_autograds_of_the_rounded_product(recipe: str, target: str) -> None:
    rules = make(target, recipe=recipe, backward="dequantized")
    if not rules.recipe_supported:
        pytest.skip("the target has no such gemm")
    steps = run_passes(joint_graph(*linear()), rules)
    assert steps[1].changes == 1 and ops(steps[-1].graph)["mm"] == 2
    # A GPU's gemm of many scales writes bf16; gradients are FP32.
    done = recipe
    if (recipe, target) == ("blockwise", "cuda:100"):
        done = "blockwise by mxfp8"
        steps = [steps[0], steps[-1]]  # the CPU's operation has no blocks of 128
    assert_numbers(steps, product(done), tolerance=2.0**-7 if target != "cpu" else 1e-4)


def test_the_graph_reads_the_codes_of_forward() -> None:
    _, rewritten, shared, *_ = run_passes(joint_graph(*linear()), make(backward="dequantized"))
    assert (rewritten.changes, shared.changes) == (1, 0)
    expecttest.assert_expected_inline(render(shared.graph), """\
primals_1: f32[256, 128]
primals_2: f32[64, 128]
tangents_1: f32[64, 256]
quantize: (e4m3[64, 128], f32[1, 1]) = quantize(primals_2, e4m3, [-1, -1])
quantize_1: (e4m3[256, 128], f32[1, 1]) = quantize(primals_1, e4m3, [-1, -1])
_scaled_mm: f32[64, 256] = _scaled_mm(quantize[0], quantize_1[0].T, quantize[1], quantize_1[1].T)
dequantize_fp8_operand: f32[64, 128] = dequantize_fp8_operand(quantize[0], quantize[1], [-1, -1], f32)
mm: f32[256, 128] = mm(tangents_1.T, dequantize_fp8_operand)
dequantize_fp8_operand_1: f32[256, 128] = dequantize_fp8_operand(quantize_1[0], quantize_1[1], [-1, -1], f32)
mm_1: f32[64, 128] = mm(tangents_1, dequantize_fp8_operand_1)
return _scaled_mm, mm, mm_1
""")


@pytest.mark.parametrize("inputs, outputs", [(100, 120), (48, 33)])
@pytest.mark.parametrize("recipe, target", [("tensorwise", "cuda:90"), ("mxfp8", "cuda:100"), ("nvfp4", "cpu")])
def test_sizes_that_are_padded_for_forward_are_whole_in_backward(
    recipe: str, target: str, inputs: int, outputs: int
) -> None:
    steps = run_passes(joint_graph(*linear(inputs, outputs)), make(target, recipe=recipe, backward="dequantized"))
    if steps[1].changes:
        assert_numbers(steps, product(recipe), tolerance=2.0**-7 if target != "cpu" else 1e-4)


class Other(nn.Module):
    """Products that are not ``x @ w.T``."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        shape = {"x @ w": (32, 48), "w @ x": (48, 32), "stack": (3, 32, 48)}[how]
        self.w = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.w @ x if self.how == "w @ x" else x @ self.w


@pytest.mark.parametrize("how, shape", [("x @ w", (16, 32)), ("w @ x", (32, 16)), ("stack", (3, 16, 32))])
def test_every_kind_of_product_has_its_gradient(how: str, shape: tuple[int, ...]) -> None:
    steps = run_passes(joint_graph(Other(how), torch.randn(shape, requires_grad=True)), make(backward="dequantized"))
    assert steps[1].changes == 1 and "dequantize_fp8_operand" in ops(steps[1].graph)

    def one(x: Tensor) -> Tensor:
        return rounded(x.reshape(-1, x.shape[-1]), "tensorwise", weight=False).view(x.shape)

    def each(x: Tensor) -> Tensor:
        return torch.stack([one(part) for part in x]) if how == "stack" else one(x)

    def reference(w: Tensor, x: Tensor) -> Tensor:
        return each(w) @ each(x) if how == "w @ x" else each(x) @ each(w)

    assert_numbers(steps, reference)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["Hugging Face's op", "torch's op"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradients_of_experts_are_of_their_dequantized_weights_and_tokens(recipe: str, dtype: torch.dtype) -> None:
    offsets = offsets_of(7, 0, 16, 1)
    joint = joint_graph(Experts(4, 32, 48, dtype=dtype), torch.randn(24, 32, dtype=dtype, requires_grad=True), offsets)
    steps = run_passes(joint, make(recipe=recipe, backward="dequantized"))
    assert steps[1].changes == 1
    inputs = [offsets if t.dtype == torch.int32 else t for t in random_inputs(joint.graph)]
    x, w = (next(t for t in inputs if t.dim() == dim).double().requires_grad_() for dim in (2, 3))
    flat = rounded(w.reshape(-1, 32), recipe, weight=False).view(w.shape)
    tokens = rounded(x, recipe, weight=False)
    groups = torch.bucketize(torch.arange(24), offsets, right=True)
    y = torch.stack([token @ flat[group].t() for token, group in zip(tokens, groups)])
    by_shape = dict(zip(((24, 32), (4, 48, 32)), torch.autograd.grad(y, (x, w), inputs[-1].double())))
    tolerance = 1e-6 if dtype == torch.float32 else 2.0**-8  # operands are rounded to bf16 once, and so are results
    for step in (steps[1], steps[-1]):
        _, *found = (t for t in run(step.graph, inputs) if t is not None)
        assert len(found) == 2
        for gradient in found:
            expected = by_shape[tuple(gradient.shape)]
            assert (gradient.double() - expected).norm() < tolerance * expected.norm()


def test_high_precision_gradients_are_of_the_original_tensors() -> None:
    steps = run_passes(joint_graph(*linear()), make(backward="high_precision"))
    inputs = random_inputs(steps[0].graph)
    before, after = run(steps[0].graph, inputs), run(steps[-1].graph, inputs)
    assert not torch.equal(before[0], after[0])
    assert all(torch.equal(one, other) for one, other in zip(before[1:], after[1:], strict=True))


def test_a_layer_whose_forward_is_not_quantized_keeps_its_gradient_and_its_reason() -> None:
    made = split(*linear(), backward="dequantized", min_dim=512)
    assert {row.reason for row in made.report.rows} == {"N=256 is below min_dim=512"}


def test_rows_say_what_backward_reads() -> None:
    reasons = {}
    for backward in ("high_precision", "dequantized"):
        rows = split(*linear(), backward=backward).report.rows
        assert [row.decision for row in rows] == ["rewritten", "skipped", "skipped"]
        (reasons[backward],) = {row.reason for row in rows if row.gemm != "output"}
    assert reasons["high_precision"] == "backward='high_precision'"
    assert reasons["dequantized"] == "backward='dequantized': reads what forward multiplied, in float32"


class Block(nn.Module):
    """A layer whose input nothing else needs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, bias=False, dtype=BF16) for sizes in ((128, 256), (256, 128)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.neg(self.up(x)))
        return y


@pytest.mark.parametrize("target, recipe", [*(("cpu", one) for one in ("delayed", *RECIPES)), ("cuda:90", "delayed")])
def test_codes_are_kept_for_backward_and_not_what_they_stand_for(target: str, recipe: str) -> None:
    made = split(Block(), torch.randn(TOKENS, 128, dtype=BF16, requires_grad=True), target=target, recipe=recipe,
                 backward="dequantized")  # fmt: skip
    inputs = TOKENS * (128 + 256)
    kept = [node.meta["val"] for node in made.saved if not node.name.startswith("primals")]
    assert not [tensor for tensor in kept if tensor.dtype == BF16]
    codes = sum(tensor.numel() for tensor in kept if tensor.dtype in (E4M3, torch.uint8) and tensor.shape[0] == TOKENS)
    assert codes <= inputs * (0.5 + 1 / 16 if recipe == "nvfp4" else 1 + 1 / 32)
