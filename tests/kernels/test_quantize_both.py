"""Both quantizes of a matrix at once: the same bits as one after the other, in the layouts of a GPU's gemms."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fp8_compile.kernels.quantize import quantize
from fp8_compile.kernels.quantize_both import quantize_both, quantize_both_op

E4M3 = torch.float8_e4m3fn
each_block = pytest.mark.parametrize("block", [(1, -1), (1, 128), (128, 128)], ids=str)


@each_block
def test_rows_and_columns_are_those_of_the_matrix_and_of_its_transpose(block: tuple[int, int], generator) -> None:
    x = torch.randn(130, 300, generator=generator)
    x[7, 200] = torch.inf
    q, dequant, q_t, dequant_t = quantize_both(x, E4M3, block, multiple=16)
    for (codes, scales), matrix in (((q, dequant), x), ((q_t[:, :130], dequant_t), x.t())):
        expected = quantize(matrix, E4M3, block)
        for actual, wished in zip((codes, scales), expected):
            torch.testing.assert_close(actual.float(), wished.float(), rtol=0, atol=0, equal_nan=True)
        assert scales.isnan().sum() == 1
    assert q_t.shape == (300, 144) and not q_t[:, 130:].float().any()


@pytest.mark.parametrize(
    "shape, block, strides, strides_t",
    [
        ((130, 300), (1, -1), (1, 1), (1, 1)),
        ((130, 300), (1, 128), (1, 130), (1, 300)),  # the row is the fastest dimension
        ((130, 100), (1, 128), (1, 1), (1, 100)),  # one block a row: a line
        ((130, 600), (128, 128), (8, 1), (4, 1)),  # 5 and 2 tiles along the contraction: lines of 8 and 4
    ],
)
def test_scales_lie_as_cublas_reads_them(
    shape: tuple[int, int], block: tuple[int, int], strides: tuple[int, int], strides_t: tuple[int, int]
) -> None:
    _, dequant, _, dequant_t = quantize_both(torch.ones(shape), E4M3, block)
    assert (dequant.stride(), dequant_t.stride()) == (strides, strides_t)


@each_block
def test_the_op_promises_what_it_gives(block: tuple[int, int]) -> None:
    x = torch.randn(40, 200)
    real = quantize_both_op(x, E4M3, list(block), 128, torch.bfloat16)
    with FakeTensorMode() as mode:
        promised = quantize_both_op(mode.from_tensor(x), E4M3, list(block), 128, torch.bfloat16)
    for one, other in zip(real, promised):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    assert torch.equal(real[0].float(), quantize(x.bfloat16(), E4M3, block)[0].float())
