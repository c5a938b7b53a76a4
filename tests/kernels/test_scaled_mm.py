"""The FP8 gemm against FP64, with the budget of the house: twice the error of an FP32 sum in the slowest order."""

from __future__ import annotations

import fp8_reference as reference
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

from fp8_compile.kernels.cpu.scaled_mm import scaled_mm_op
from fp8_compile.kernels.quantize import quantize
from fp8_compile.kernels.scaled_mm import scaled_mm

TENSOR, ROW, ROW_BLOCK, TILE = (-1, -1), (1, -1), (1, 128), (128, 128)
# Blocks of the left and the right operand as (rows, contraction): each recipe's three gemms.
RECIPES = {
    "tensorwise": (TENSOR, TENSOR),
    "rowwise": (ROW, ROW),
    "blockwise, input by weight": (ROW_BLOCK, TILE),
    "blockwise, weight by input": (TILE, ROW_BLOCK),
    "blockwise, grad_weight": (ROW_BLOCK, ROW_BLOCK),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
# (M, N, K): around the tile of 128 on each side, one row, one column, odd sizes.
SHAPES = [(7, 9, 5), (1, 200, 128), (130, 1, 129), (37, 130, 100), (129, 257, 128), (5, 300, 385), (140, 20, 256)]
E4M3, E5M2 = reference.E4M3, reference.E5M2


class Gemm:
    """Operands of one product: x [M, K] and w [N, K], quantized by both implementations."""

    def __init__(self, x: torch.Tensor, w: torch.Tensor, recipe: str, formats=(E4M3, E4M3)) -> None:
        blocks = RECIPES[recipe]
        self.left, self.scale_left = quantize(x, formats[0].dtype, blocks[0])
        right, scale_right = quantize(w, formats[1].dtype, blocks[1])
        self.right, self.scale_right = right.t(), scale_right.t()
        self.sides = [reference.quantize(m, f, b) for m, f, b in zip((x, w), formats, blocks)]

    def run(self, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        """The results of the plain function and of the CPU's op."""
        arguments = (self.left, self.right, self.scale_left, self.scale_right, bias, out_dtype)
        return [run(*arguments) for run in (scaled_mm, scaled_mm_op)]

    def check(self, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.float32) -> None:
        """Against FP64, in the Frobenius norm; the reference sums in FP32 and rounds once to the output's dtype."""
        added = 0.0 if bias is None else reference.to_numpy(bias)
        exact = reference.gemm(*self.sides) + added
        in_fp32 = reference.gemm(*self.sides, sum_in=np.float32) + np.float32(added)
        rounded = reference.to_numpy(torch.from_numpy(in_fp32).to(out_dtype))
        for result in self.run(bias, out_dtype):
            assert result.dtype == out_dtype and result.shape == exact.shape
            results = (reference.to_numpy(result), rounded)
            found, low = (reference.Noise({"result": one}, {"result": exact}) for one in results)
            found.check(low)

    def check_each_element(self, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
        """Against FP64, with what FP32 and the rounding to the output's dtype can do at worst."""
        added = 0.0 if bias is None else reference.to_numpy(bias)
        exact = reference.gemm(*self.sides) + added
        info = torch.finfo(out_dtype)
        in_fp32 = reference.worst_fp32_error(*self.sides) + 2.0**-23 * np.abs(added)
        rounding = info.eps / 2 * (np.abs(exact) + in_fp32) + info.smallest_normal * info.eps / 2
        for result in self.run(bias, out_dtype):
            error = np.abs(reference.to_numpy(result) - exact)
            assert (error <= in_fp32 + rounding).all(), np.max(error / (in_fp32 + rounding))


def random_gemm(shape, recipe, generator, formats=(E4M3, E4M3)) -> Gemm:
    """Rows and columns of very different sizes, so that a scale given to the wrong one shows."""
    m, n, k = shape

    def matrix(rows: int) -> torch.Tensor:
        sizes = [2.0 ** torch.randint(-6, 7, shape, generator=generator) for shape in ((rows, 1), (1, k))]
        return torch.randn(rows, k, generator=generator) * sizes[0] * sizes[1]

    return Gemm(matrix(m), matrix(n), recipe, formats)


@each_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_product_is_that_of_the_dequantized_matrices(shape, recipe, generator) -> None:
    random_gemm(shape, recipe, generator).check()


@each_recipe
def test_formats_mix(recipe, generator) -> None:
    for formats in ((E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)):
        random_gemm((19, 140, 130), recipe, generator, formats).check()


@each_recipe
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bias_is_added_before_the_one_rounding_to_the_output_dtype(out_dtype, recipe, generator) -> None:
    x, w = torch.randn(21, 130, generator=generator), torch.randn(150, 130, generator=generator)
    bias = (10 * torch.randn(150, generator=generator)).to(out_dtype)
    Gemm(x, w, recipe).check(bias, out_dtype)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_scales_that_are_powers_of_two_and_short_sums_make_the_product_exact(recipe) -> None:
    """No tolerance at all: every product and partial sum of these FP8 values is an FP32 number."""
    x = torch.tensor([[448.0, -1.0, 0.0, 3.5], [0.0, 448.0, -2.0, 0.25]])
    w = torch.tensor([[1.0, 448.0, 2.0, -8.0], [448.0, 0.5, -4.0, 16.0], [0.0, 0.0, 448.0, 1.0]])
    for result in Gemm(x, w, recipe).run():
        assert torch.equal(result, x @ w.t())


# Of an Inf: a NaN makes its whole block NaN in q already, but an Inf leaves zeros there, and all depends on the scale.
# (MKL's sgemm takes a factor of NaN for 1, so that the scale must not be given to it.)
@each_recipe
@pytest.mark.parametrize("shape", [(140, 200, 150), (9, 24, 40)], ids=lambda shape: "x".join(map(str, shape)))
def test_a_scale_that_is_nan_reaches_the_rows_it_belongs_to_and_no_others(shape, recipe, generator) -> None:
    m, n, k = shape
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    x[m - 2, 2], w[3, k - 3] = torch.inf, -torch.inf
    rows, cols = (
        slice(None) if block[0] == -1 else slice(i // block[0] * block[0], (i // block[0] + 1) * block[0])
        for i, block in zip((m - 2, 3), RECIPES[recipe])
    )
    expected = torch.zeros(m, n, dtype=torch.bool)
    expected[rows], expected[:, cols] = True, True
    for bias in (None, torch.ones(n)):
        for result in Gemm(x, w, recipe).run(bias):
            assert torch.equal(result.isnan(), expected)


@hypothesis.given(
    shape=st.tuples(*[st.integers(1, 150)] * 2, st.integers(1, 270)),
    recipe=st.sampled_from(sorted(RECIPES)),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
@hypothesis.settings(max_examples=40)
def test_no_element_of_any_shape_is_further_off_than_fp32_can_be(shape, recipe, out_dtype, with_bias, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, shape[2], generator=generator) for rows in shape[:2])
    bias = torch.randn(shape[1], generator=generator).to(out_dtype) if with_bias else None
    Gemm(x, w, recipe).check_each_element(bias, out_dtype)
